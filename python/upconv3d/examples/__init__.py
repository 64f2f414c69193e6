# SPDX-License-Identifier: Apache-2.0
"""Programs to copy from; they use the package as anyone would."""
