# SPDX-License-Identifier: Apache-2.0
"""`python -m upconv3d.profile`: where one block's time goes, beside the device's ceilings and its peers.

perf/bench.py measures many shapes with the same cases and the same clock.
"""
