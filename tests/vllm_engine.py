# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines for tests, each in processes of its own.

``start(folder, name, model, ...)`` runs ``python vllm_engine.py SPEC.json`` and returns what it
wrote: tokens and logprobs of every prompt, and what each worker says of itself.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import vllm_models

# A prompt longer than a step is prefilled in chunks; odd counts, one of a single token.
LENGTHS = (7, 1, 61, 13)
STEP_TOKENS, NEW_TOKENS = 48, 6
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # as the next, what vLLM sets before it spawns workers
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def start(
    folder: Path,
    name: str,
    model: str,
    sp_passes: Mapping[str, Any] | None,
    env: Mapping[str, str] | None = None,
    restore: bool = False,
    fork: bool = True,
    timeout: float = 280,
    **engine: Any,
) -> dict[str, Any]:
    """One engine on 2 ranks from start to end.

    Args:
        sp_passes: the options; None: vLLM alone.
        restore: run all prompts once more with whole weights in vLLM's eager code.
        fork: fork the workers; else they are spawned, and load plugins themselves.
        engine: more arguments of ``LLM``.
    """
    ids = random.Random(0)
    spec = {
        "engine": {
            "model": str(vllm_models.write(model, folder)),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "tensor_parallel_size": 2,
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": STEP_TOKENS,
            "enable_prefix_caching": False,
            "dtype": "float32",
            "seed": 0,
            "worker_extension_cls": "vllm_plain_linear.WorkerExtension",
            "additional_config": {} if sp_passes is None else {"sp_passes": sp_passes},
            **engine,
        },
        "prompts": [[ids.randrange(2, 512) for _ in range(n)] for n in LENGTHS],
        "restore": restore,
        "fork": fork,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(spec))
    environment = {**os.environ, **_ENV, "VLLM_CACHE_ROOT": str(folder / "cache"), **(env or {})}
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    log = _run(path, environment, timeout)
    result: dict[str, Any] = json.loads(path.with_suffix(".out").read_text())
    return {**result, "log": log}


def _run(spec: Path, env: dict[str, str], timeout: float) -> str:
    """The log of one run; its processes end with it."""
    log = spec.with_suffix(".log")
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, __file__, str(spec)],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text()
    if code != 0:
        tail = "\n".join(text.splitlines()[-60:])
        raise AssertionError(f"{spec.stem} ended with {code} after at most {timeout} s:\n{tail}")
    return text


def main(spec_path: Path) -> None:
    spec: dict[str, Any] = json.loads(spec_path.read_text())
    from vllm import LLM, SamplingParams

    if spec["fork"]:
        _import_once()
    llm = LLM(**spec["engine"])
    params = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, logprobs=5, ignore_eos=True, detokenize=False
    )

    def generate() -> list[dict[str, Any]]:
        """One prompt alone, then all of them together."""
        prompts = [{"prompt_token_ids": ids} for ids in spec["prompts"]]
        batches = [llm.generate(part, params, use_tqdm=False) for part in (prompts[:1], prompts)]
        return [_as_dict(out.outputs[0]) for batch in batches for out in batch]

    result = {"outputs": generate(), "workers": llm.collective_rpc("sp_state")}
    if spec["restore"]:
        result["restored"] = llm.collective_rpc("sp_restore")
        result["eager"] = generate()
    spec_path.with_suffix(".out").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # the workers end when their parent has; vLLM's own shutdown takes seconds


def _import_once() -> None:
    """Fork the workers, as vLLM does on a GPU, and look at the model's class right here.

    On a CPU it starts three more processes that import vLLM, ten seconds of CPU each.
    """
    from vllm.model_executor.models import registry
    from vllm.v1.executor import multiproc_executor

    registry._run_in_subprocess = lambda look: look()
    multiproc_executor.get_mp_context = lambda: get_context("fork")


def _as_dict(output: Any) -> dict[str, Any]:
    steps = [{str(t): found.logprob for t, found in step.items()} for step in output.logprobs]
    return {"tokens": list(output.token_ids), "logprobs": steps}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
