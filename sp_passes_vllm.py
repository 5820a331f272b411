# SPDX-License-Identifier: Apache-2.0
"""What vLLM's ``--compilation-config`` can name: a top-level module with a real attribute.

    vllm serve … --compilation-config \\
        '{"inductor_passes": {"post_grad_custom_post_pass": "sp_passes_vllm.whole_graph"}}'

The plugin does the same by itself where ``additional_config`` or ``SP_PASSES_CONFIG`` turns
sp_passes on.
"""

from __future__ import annotations

from sp_passes.vllm.graph_pass import Placeholder

whole_graph = Placeholder()
