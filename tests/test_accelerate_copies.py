# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate: copies of classes that say how they are copied, and classes put on top of ours."""

import ast
import copy
import gc
import pickle
import sys
import threading
import weakref

import pytest
import torch
import upconv3d
from accelerated_models import Up as _Up
from accelerated_models import cna, count_blocks_run
from torch import nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from upconv3d._accelerated import proof, recorded
from upconv3d._accelerated.swap import is_swapped


def _look_on(*_):
    """What gc calls around a collection."""


def _volume():
    return torch.randn(2, 6, 3, 4, 3, generator=torch.Generator().manual_seed(3))


class _ByStateDict(_Up):
    def __getstate__(self):
        return {"values": self.state_dict()}

    def __setstate__(self, state):
        self.__init__()
        self.load_state_dict(state["values"])


class _InATuple(_Up):
    def __getstate__(self):
        return (self.__dict__,)

    def __setstate__(self, state):
        self.__dict__.update(state[0])


class _Emptied(_InATuple):
    """Puts back what it knows of."""

    def __setstate__(self, state):
        self.__dict__ = {name: value for name, value in state[0].items() if not name.startswith("_upconv3d")}


class _Chain(nn.Sequential):
    def __init__(self):
        super().__init__(*cna())


class _ChainByStateDict(_Chain):
    __getstate__, __setstate__ = _ByStateDict.__getstate__, _ByStateDict.__setstate__


class _ChainInATuple(_Chain):
    __getstate__, __setstate__ = _InATuple.__getstate__, _InATuple.__setstate__


COPIES = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}
OWN_STATES = [_ByStateDict, _InATuple, _Emptied, _ChainByStateDict, _ChainInATuple]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("make", OWN_STATES)
def test_states_of_a_class_of_its_own(make, how, monkeypatch):
    model = make().eval()
    expected = model(_volume())
    assert upconv3d.accelerate(model, precision="ieee").replaced
    model(_volume())
    model(_volume())  # a Sequential keeps what it found
    twin = COPIES[how](model)
    assert is_swapped(twin) == (make is not _Emptied)
    calls = count_blocks_run(monkeypatch.setattr)
    torch.testing.assert_close(twin(_volume()), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == is_swapped(twin)
    upconv3d.restore(twin)
    assert type(twin) is make and torch.equal(twin(_volume()), expected)


def _on_top(model):
    class Louder(type(model)):
        def forward(self, x):
            return super().forward(x) * 0 + 7

    model.__class__ = Louder
    return Louder


@pytest.mark.parametrize("how", ["deepcopy", "copy"])
@pytest.mark.parametrize("make", [_Up, cna, _InATuple])
def test_copies_have_the_class_that_somebody_put_on_top(make, how):
    model = make()
    upconv3d.accelerate(model)
    cls = _on_top(model)
    twin = COPIES[how](model)
    assert type(twin) is cls and (twin(_volume()) == 7).all()
    upconv3d.restore(twin)
    assert (twin(_volume()) == 7).all() and not is_swapped(twin) and is_swapped(model)


@pytest.mark.parametrize("make", [_Up, cna, lambda: nn.ConvTranspose3d(6, 8, 2), lambda: nn.GroupNorm(2, 6)])
def test_a_forward_that_was_kept_outlives_restore(make):
    model = make()
    expected = model(_volume())
    upconv3d.accelerate(model, bare=True, norms=True)
    assert is_swapped(model)
    kept = model.forward
    model.forward = lambda x: kept(x) * 2
    torch.testing.assert_close(model(_volume()), expected * 2, rtol=1e-4, atol=1e-5)
    upconv3d.restore(model)
    torch.testing.assert_close(model(_volume()), expected * 2)


@pytest.mark.parametrize("restored", [False, True])
def test_classes_go_with_their_modules(restored):
    class Own(_Up):
        pass

    model = Own()
    report = upconv3d.accelerate(model)
    model(_volume())
    twin = copy.deepcopy(model)
    assert type(twin) is type(model) is not Own
    if restored:
        report.restore()
    classes = [weakref.ref(type(model)), weakref.ref(Own)]
    del model, twin, report, Own
    gc.collect()
    assert [cls() for cls in classes] == [None, None]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("child", ["up", "norm"])
def test_copies_of_a_part_that_knows_its_model(child, how, monkeypatch, recwarn):
    """As a hook does that is a method of the model. The model's copy is complete before the part's is."""
    model = _Up()
    model.get_submodule(child).whole = [model]
    upconv3d.accelerate(model, precision="ieee")
    twin = COPIES[how](model.get_submodule(child)).whole[0]
    again = copy.deepcopy(twin)
    assert is_swapped(twin)
    calls = count_blocks_run(monkeypatch.setattr)
    for each in (twin, again):
        torch.testing.assert_close(each(_volume()), model(_volume()))
    assert len(calls) == 4 and not [each for each in recwarn if "upconv3d" in str(each.message)]
    upconv3d.restore(twin)
    assert twin.__dict__.keys() == _Up().__dict__.keys()


def test_copies_leave_other_threads_alone():
    """A copy is traced anew, for which torch.fx exchanges methods of nn.Module."""
    model, plain = _Up(), _Up()
    upconv3d.accelerate(model)
    x, done, wrong = _volume(), threading.Event(), []
    expected = plain(x)

    def serve():
        while not done.is_set():
            try:
                wrong.extend([] if torch.equal(plain(x), expected) else ["another value"])
            except Exception as error:
                wrong.append(repr(error))

    def copies():
        try:
            for _ in range(3):
                torch.testing.assert_close(copy.deepcopy(model)(x), pickle.loads(pickle.dumps(model))(x))
        except Exception as error:
            wrong.append(repr(error))

    server, copying = threading.Thread(target=serve), [threading.Thread(target=copies) for _ in range(3)]
    for thread in (server, *copying):
        thread.start()
    for thread in copying:
        thread.join()
    done.set()
    server.join()
    assert not wrong, f"{len(wrong)}: {sorted(set(wrong))[:3]}"


@pytest.mark.parametrize("beside", ["ours", "another's"])
def test_sources_are_parsed_beside_other_threads(beside):
    """CPython 3.11 raises SystemError where two threads parse at once and are switched between meanwhile."""
    source = "def forward(self, x):\n" + "    x = [y + x * (2 - y) for y in (1, 2)]\n" * 50
    expected, wrong, disturbed = ast.dump(ast.parse(source)), [], []

    def parse(function, errors):
        for _ in range(100):
            try:
                errors.extend([] if ast.dump(function(source)) == expected else ["another tree"])
            except SystemError as error:
                errors.append(repr(error))

    # A collection in the middle of a parse runs Python code, after which another thread may go on.
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    others = [(proof._parse, wrong)] * 3 if beside == "ours" else [(ast.parse, disturbed)]
    threads = [threading.Thread(target=parse, args=call) for call in [(proof._parse, wrong), *others]]
    gc.callbacks.append(_look_on)
    try:
        sys.setswitchinterval(1e-6)
        gc.set_threshold(5)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
        gc.callbacks.remove(_look_on)
    assert not wrong, f"{len(wrong)}: {sorted(set(wrong))[:3]}"


@pytest.mark.parametrize("place", ["begins", "looks"])
def test_other_threads_do_not_trace(place, monkeypatch):
    """What torch.compile made of a model refuses to run where torch.fx says that it traces."""
    look, begin = recorded._Tracer.look, _LazyGraphModule.force_recompile
    told = []

    def ask():
        if not told:
            thread = threading.Thread(target=lambda: told.append(bool(is_fx_symbolic_tracing())))
            thread.start()
            thread.join()
            told.append(bool(is_fx_symbolic_tracing()))

    if place == "looks":
        monkeypatch.setattr(
            recorded._Tracer, "look", lambda self, *a: (hasattr(self, "root") and ask(), look(self, *a))[1]
        )
    else:  # what torch.fx calls first
        monkeypatch.setattr(_LazyGraphModule, "force_recompile", lambda *a: (ask(), begin(*a))[1])
    upconv3d.accelerate(_Up())
    assert told == [False, True]
    assert not is_fx_symbolic_tracing()
