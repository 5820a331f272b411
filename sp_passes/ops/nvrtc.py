# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ kernels of ``ops/cuda``: compiled once a process by NVRTC, launched by the driver.

Both come with PyTorch's CUDA builds (``cuda-bindings``, ``nvidia-cuda-nvrtc``): nothing is
built ahead and no compiler need be installed. Sizes that a kernel must know when it is
compiled are macros, so that one source serves all of them.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from ..errors import SPError

_FOLDER = Path(__file__).parent / "cuda"


@cache
def missing() -> str | None:
    """Why no kernel can be compiled here, or None."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError as err:
        return f"it is compiled with cuda-bindings, which cannot be imported: {err}"
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as err:  # cuda-bindings looks for the library at the first call
        return f"it is compiled by NVRTC, which cannot be loaded: {str(err).splitlines()[0]}"
    return None


@lru_cache(maxsize=8)
def compile_source(
    name: str, macros: tuple[tuple[str, int], ...], arch: str, prelude: str = ""
) -> bytes:
    """The cubin of ``ops/cuda/<name>.cu``; needs no GPU. Headers of that folder are found.

    Args:
        arch: such as ``"sm_90a"``.
        prelude: CUDA C++ to go before the source.

    Raises:
        SPError: NVRTC is missing or refused the source; the message holds its log.
    """
    from cuda.bindings import nvrtc

    source = prelude.encode() + (_FOLDER / f"{name}.cu").read_bytes()
    headers = sorted(_FOLDER.glob("*.h"))
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"-default-device"]
    options += [f"-D{key}={value}".encode() for key, value in macros]
    try:
        error, program = nvrtc.nvrtcCreateProgram(
            source,
            f"{name}.cu".encode(),
            len(headers),
            [path.read_bytes() for path in headers],
            [path.name.encode() for path in headers],
        )
    except RuntimeError as err:
        raise SPError(f"NVRTC cannot be loaded, so {name} cannot be compiled: {err}") from None
    _require(error, f"NVRTC on {name}.cu")
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(error):
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytes(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise SPError(f"NVRTC refused {name}.cu ({options}):\n{log.decode(errors='replace')}")
    error, size = nvrtc.nvrtcGetCUBINSize(program)
    _require(error, f"NVRTC on {name}.cu")
    cubin = bytes(size)
    (error,) = nvrtc.nvrtcGetCUBIN(program, cubin)
    _require(error, f"NVRTC on {name}.cu")
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def _require(error: Any, what: str) -> None:
    if int(error):
        raise SPError(f"{what} failed: {error!r}")


class Arguments:
    """Arguments of a kernel in the driver's form: fields that keep their addresses.

    Args:
        fields: a ctypes value for each parameter, in order; change them through ``.value``.
    """

    def __init__(self, *fields: Any) -> None:
        self.fields = fields
        self._pointers = (ctypes.c_void_p * len(fields))(*map(ctypes.addressof, fields))
        self.address = ctypes.addressof(self._pointers)


class Kernel:
    """A compiled kernel on the current device."""

    def __init__(self, function: Any, shared: int) -> None:
        from cuda.bindings import driver

        self.function, self.shared = function, shared
        self._launch = driver.cuLaunchKernel
        if shared > 48 << 10:
            attribute = driver.CUfunction_attribute
            which = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (error,) = driver.cuFuncSetAttribute(function, which, shared)
            _require(error, f"{shared} bytes of shared memory")
            # All that a multiprocessor can give; left alone, the driver chooses how much.
            which = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            (error,) = driver.cuFuncSetAttribute(function, which, 100)
            _require(error, "the carve-out for shared memory")

    def launch(self, grid: int, block: int, arguments: Arguments, stream: int) -> None:
        """``grid`` blocks of ``block`` threads on the stream whose handle is given."""
        (error,) = self._launch(
            self.function, grid, 1, 1, block, 1, 1, self.shared, stream, arguments.address, 0
        )
        if error:
            _require(error, "the launch of a kernel")


class EarlyLaunch:
    """Launches of a kernel that may begin before the launch ahead has ended; of one thread.

    Programmatic dependent launch: the kernel itself waits for the launch ahead.
    """

    def __init__(self, kernel: Kernel, grid: int, block: int) -> None:
        from cuda.bindings import driver

        kinds = driver.CUlaunchAttributeID
        early = driver.CUlaunchAttribute()
        early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        self._config = config = driver.CUlaunchConfig()
        config.attrs, config.numAttrs = [early], 1
        config.gridDimX, config.blockDimX = grid, block
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = kernel.shared
        self._kernel, self._launch = kernel, driver.cuLaunchKernelEx

    def __call__(self, arguments: Arguments, stream: int) -> None:
        self._config.hStream = stream
        (error,) = self._launch(self._config, self._kernel.function, arguments.address, 0)
        if error:
            _require(error, "the launch of a kernel")


@cache
def kernel(
    name: str,
    entry: str,
    macros: tuple[tuple[str, int], ...],
    shared: int,
    device: int,
    prelude: str = "",
) -> Kernel:
    """``entry`` (declared ``extern "C"``) of ``ops/cuda/<name>.cu``, loaded on ``device``.

    Args:
        shared: bytes of dynamic shared memory of each launch.
    """
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_source(name, macros, f"sm_{major}{minor}a", prelude)
    # Loading is no part of a graph that is being captured.
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    error, before = driver.cuThreadExchangeStreamCaptureMode(mode)
    _require(error, "cuThreadExchangeStreamCaptureMode")
    try:
        with torch.cuda.device(device):
            error, module = driver.cuModuleLoadData(cubin)
            _require(error, f"loading {name}")
            error, function = driver.cuModuleGetFunction(module, entry.encode())
            _require(error, f"{entry} of {name}")
            return Kernel(function, shared)
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)
