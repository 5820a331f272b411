# SPDX-License-Identifier: Apache-2.0
"""``python -m sp_passes``: the command line, for ``torchrun -m sp_passes …`` too."""

from __future__ import annotations

from .cli.main import main

if __name__ == "__main__":
    main()
