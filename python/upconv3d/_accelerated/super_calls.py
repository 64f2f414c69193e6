# SPDX-License-Identifier: Apache-2.0
"""Methods that call super(self.__class__, self): in a subclass of their class, such a call never ends."""

import dis
import types
from typing import Any


def names_its_class(method: Any) -> bool:
    """Whether method, as a class holds it, takes super() of self.__class__ or type(self)."""
    for name in ("__func__", "fget"):  # of a static or class method, and of a property
        method = getattr(method, name, method)
    if not isinstance(method, types.FunctionType):
        return False
    names = method.__code__.co_names
    if "super" not in names or not {"__class__", "type"} & set(names):
        return False
    loads = [each for each in dis.get_instructions(method) if each.opname.startswith("LOAD_")]
    for function, first, second in zip(loads, loads[1:], loads[2:], strict=False):
        if (function.opname, function.argval) != ("LOAD_GLOBAL", "super"):
            continue
        of_class = first.opname.startswith("LOAD_FAST") and second.argval == "__class__"
        if of_class or (first.opname, first.argval) == ("LOAD_GLOBAL", "type"):
            return True
    return False
