# SPDX-License-Identifier: Apache-2.0
"""The parts of ``sp-passes demo``; ``report``, ``verify`` and ``bench`` use them too.

full_size      Kimi-K3 at full width on fake tensors, as one rank sees it
shrunken       the same layers at toy widths, run on local ranks
wrong_design   the rewrite that looks right and is not
"""
