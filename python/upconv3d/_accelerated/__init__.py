# SPDX-License-Identifier: Apache-2.0
"""What upconv3d.accelerate is made of: chains of modules, containers that run them, traced forwards."""
