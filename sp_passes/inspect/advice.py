# SPDX-License-Identifier: Apache-2.0
"""What would make a skipped site pass: one clause for each kind of reason."""

from __future__ import annotations

ADVICE: dict[str, str] = {
    "already sharded": "nothing: this rank holds only its part of the weight",
    "addend": "add it after the second linear, or give it the tokens' placement",
    "bias": "add the bias once, after the sum",
    "bias broadcast": "store the bias at the layer's full width",
    "bias computed": "make the bias a parameter, or fold the computation into it beforehand",
    "bias sharded": "declare the bias as its weight is",
    "dtype": "keep activation and weight in one of float32, float64, float16, bfloat16",
    "feature input": "keep that vector whole on every rank",
    "features unused": "drop the unused output features from the weight",
    "few tokens": "a larger token_range",
    "gather dimension": "gather along dimension 0, the tokens",
    "merged along inputs": "split the product by inputs",
    "no linear": "nothing to fuse here",
    "no rows": "pass activations as [tokens, features]",
    "no token range": "give SPConfig a token_range, so that cost can be judged",
    "not divisible": "a tp_size that divides the width, or pad the weight",
    "not feature-local": "compute each feature from the same feature alone between the linears, "
    "or cut the model there",
    "not gathered": "gather the tokens before the linear",
    "one rank": "tp_size of at least 2",
    "order": "move the call that stands in between",
    "other group": "the tensor-parallel group; others are left alone",
    "overlap": "nothing: the other site covers the weight",
    "padding": "pad with rows at the end only",
    "randomness": "no dropout: call eval() before compiling",
    "reduction": "a sum over the ranks",
    "row input": "shard it by tokens as the activations are",
    "scalar input": "keep that scalar whole on every rank",
    "scatter dimension": "scatter along dimension 0, the tokens",
    "slower": "another token_range, or none to rewrite every legal site",
    "tokens in blocks": "one block of rows for each rank",
    "tokens not sharded": "sequence-parallel serving (tokens='sharded'), or the pattern "
    "sequence_parallel",
    "tokens unknown": "declare_op for the op that is named, so that placements pass through it",
    "too narrow": "fewer ranks",
    "too small": "nothing: it would move more than it saves",
    "two layouts": "use one weight in one way only",
    "used elsewhere": "read the value in one place only, or after the sum",
    "weight returned": "do not return weights from the graph",
    "weight used elsewhere": "one use of the weight, or compile the uses apart",
    "weight computed": "store the weight as it is used (cast or dequantise it once, at load time)",
    "unknown op": "register_linear or register_vendor_linear for the op",
    "activations multiplied": "nothing: no weight takes part",
}


def category(reason: str) -> str:
    """What stands before the first colon."""
    return reason.partition(":")[0]


def what_helps(reason: str) -> str:
    """One clause; "" where none is known."""
    if reason.startswith("tokens unknown") and "(aten::" in reason:
        return "keep each rank's rows apart up to there: that op mixes them"
    return ADVICE.get(category(reason), "")
