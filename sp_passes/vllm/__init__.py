# SPDX-License-Identifier: Apache-2.0
"""sp_passes inside vLLM: nothing here is imported unless vLLM is.

config      options: additional_config["sp_passes"] or SP_PASSES_CONFIG
plugin      the vllm.general_plugins entry point: what happens around load_model and profiling
session     one worker's state: options, group, reports, bytes given back
graph_pass  whole-graph route: the post-grad pass in vLLM's compiled graphs
names       which parameter a graph input is, and what its layer says of its placement
memory      freed bytes reach the KV-cache budget
reports     log line, report files
_private    every vLLM name that sp_passes uses
"""
