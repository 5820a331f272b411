# SPDX-License-Identifier: Apache-2.0
"""What a vLLM user may write, and what happens where nothing, or something wrong, is written."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from sp_passes import SPError
from sp_passes.vllm import _private, config, plugin

pytest.importorskip("vllm")


def test_nothing_configured_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.ENV, raising=False)
    assert config.from_vllm({}) is None
    assert config.from_vllm({"other": 1}) is None


def test_empty_options_mean_on() -> None:
    assert config.from_vllm({"sp_passes": {}}) == config.Options()
    assert config.from_vllm({"sp_passes": True}) == config.Options()


def test_environment_is_read_where_vllm_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.ENV, '{"patterns": ["latent_projection"], "strict": true}')
    found = config.from_vllm({})
    assert found is not None and found.patterns == ("latent_projection",) and found.strict
    assert config.from_vllm({"sp_passes": {}}) == config.Options()
    assert config.from_vllm({"sp_passes": False}) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"patern": []}, "unknown key 'patern', did you mean 'patterns'?; there are patterns, ker"),
        (
            {"patterns": ["latent_projections"]},
            "unknown pattern 'latent_projections', did you mean 'latent_projection'",
        ),
        ({"routes": ["whole"]}, "unknown route 'whole'; there are graph, regional"),
        ({"routes": []}, "routes is empty"),
        ({"exclude": "*.gate.*"}, "exclude must be a list of names"),
        ({"policy": "fast"}, "policy='fast' is unknown; use one of latency, memory, balanced"),
        ({"token_range": [64, 1]}, "is reversed"),
        ({"kernels": "magic"}, "kernels='magic' is unknown"),
        ({"strict": "yes"}, "strict must be True or False"),
        ({"hardware": "abacus"}, "neither a profile"),
        ("on", "must be a JSON object of options, true or false"),
    ],
)
def test_wrong_options_say_what_to_write(given: Any, says: str) -> None:
    with pytest.raises(SPError) as caught:
        config.from_vllm({"sp_passes": given})
    assert says in str(caught.value)
    assert "additional_config['sp_passes']" in str(caught.value)


def test_environment_that_is_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.ENV, "{patterns: []}")
    with pytest.raises(SPError, match="SP_PASSES_CONFIG is not valid JSON"):
        config.from_env()


def test_include_and_exclude() -> None:
    found = config.Options(include=["*.self_attn.*"], exclude=["model.layers.0.*"])
    assert found.covers("model.layers.1.self_attn.fused_qkv_a_proj.weight")
    assert not found.covers("model.layers.0.self_attn.fused_qkv_a_proj.weight")
    assert not found.covers("model.layers.1.mlp.gate.weight")


def test_only_what_changes_graphs_changes_their_key() -> None:
    plain = config.Options().digest()
    assert config.Options(report_dir="/somewhere", strict=True).digest() == plain
    for other in (
        config.Options(exclude=["*.gate.*"]),
        config.Options(patterns=["latent_projection"]),
        config.Options(release_weights=False),
        config.Options(policy="latency"),
    ):
        assert other.digest() != plain


# --- the plugin -------------------------------------------------------------------------


class _Worker:
    """What the wrapper forwards to."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def load_model(self, *, load_dummy_weights: bool = False) -> str:
        self.calls.append(load_dummy_weights)
        return "loaded"


def _wrapper(additional_config: Any, tp_size: int = 2) -> Any:
    plugin.register()
    wrapper = _private.worker_wrapper()()
    wrapper.worker = _Worker()
    compilation = SimpleNamespace(inductor_compile_config={})
    wrapper.vllm_config = SimpleNamespace(
        additional_config=additional_config,
        compilation_config=compilation,
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
    )
    return wrapper


def test_plugin_without_configuration_only_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.ENV, raising=False)
    monkeypatch.setattr(plugin, "_run", lambda *args: pytest.fail("a step ran"))
    wrapper = _wrapper({})
    assert wrapper.load_model(load_dummy_weights=True) == "loaded"
    assert wrapper.worker.calls == [True]
    assert plugin.session_of(wrapper) is None


def test_plugin_with_unknown_key_stops_before_the_model_is_loaded() -> None:
    wrapper = _wrapper({"sp_passes": {"pattern": []}})
    with pytest.raises(SPError, match="did you mean 'patterns'"):
        wrapper.load_model()
    assert wrapper.worker.calls == []


def test_steps_run_around_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = _wrapper({"sp_passes": {}})
    seen: list[Any] = []
    monkeypatch.setattr(plugin, "_run", lambda steps, session: seen.append((steps, session)))
    wrapper.load_model()
    assert [steps for steps, _ in seen] == [plugin.BEFORE_LOAD, plugin.AFTER_LOAD]
    assert seen[0][1] is seen[1][1]
    assert wrapper.worker.calls == [False]


def test_one_rank_has_nothing_to_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(plugin.log, "warning", lambda text, *args: seen.append(text % args))
    assert plugin.session_of(_wrapper({"sp_passes": {}}, tp_size=1)) is None
    assert seen == ["sp_passes: tensor_parallel_size is 1, so there is nothing to shard"]


def test_register_twice_wraps_once() -> None:
    plugin.register()
    first = _private.worker_wrapper().load_model
    plugin.register()
    assert _private.worker_wrapper().load_model is first


def test_every_step_exists() -> None:
    from importlib import import_module

    steps = (plugin.BEFORE_LOAD, plugin.AFTER_LOAD, plugin.BEFORE_PROFILE, plugin.AFTER_PROFILE)
    steps += (plugin.BEFORE_RELOAD,)
    for module, function in [row for rows in steps for row in rows]:
        assert callable(getattr(import_module(f"sp_passes.vllm.{module}"), function))


def test_another_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_private, "version", lambda: "0.99.1")
    monkeypatch.setattr(_private, "worker_wrapper", lambda: pytest.fail("vLLM was touched"))
    monkeypatch.delenv(config.ENV, raising=False)
    seen: list[str] = []
    monkeypatch.setattr(plugin.log, "warning", lambda text, *args: seen.append(text % args))
    plugin.register()
    assert len(seen) == 1
    assert seen[0].startswith("sp_passes stays off: sp_passes works with vLLM 0.32 and 0.33, found")
    monkeypatch.setenv(config.ENV, "{}")
    with pytest.raises(SPError, match=r"found 0\.99\.1; install one of these, or take sp_passes"):
        plugin.register()


def test_a_vllm_that_was_changed_still_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch release whose wrapper has a method of that name, or that has no such wrapper."""

    class Wrapper:
        def reload_weights(self) -> None: ...

    monkeypatch.delenv(config.ENV, raising=False)
    seen: list[str] = []
    monkeypatch.setattr(plugin.log, "warning", lambda text, *args: seen.append(text % args))
    monkeypatch.setattr(_private, "worker_wrapper", lambda: Wrapper)
    plugin.register()
    monkeypatch.setattr(_private, "worker_wrapper", lambda: _private.get("v1", "Gone"))
    plugin.register()
    assert "load_model" not in vars(Wrapper)
    assert [text.partition(":")[0] for text in seen] == ["sp_passes stays off"] * 2
    monkeypatch.setenv(config.ENV, "{}")
    with pytest.raises(SPError, match=r"needs vllm\.v1\.Gone"):
        plugin.register()


def test_a_name_that_vllm_dropped_is_said() -> None:
    with pytest.raises(SPError, match=r"needs vllm\.v1\.worker\.worker_base\.Gone, which vLLM"):
        _private.get("v1.worker.worker_base", "Gone")
    with pytest.raises(SPError, match=r"takes \(module, name\) and no version"):
        _private.require_parameters(_private.get, "module", "version")


# --- the value of inductor_passes -------------------------------------------------------


def test_the_name_in_a_compilation_config_resolves() -> None:
    from vllm.config import CompilationConfig

    import sp_passes_vllm

    found = CompilationConfig(
        inductor_passes={_private.PASS_KEY: "sp_passes_vllm.whole_graph"}
    ).inductor_compile_config
    wish = found[_private.PASS_KEY]
    assert wish is sp_passes_vllm.whole_graph
    assert pickle.loads(pickle.dumps(wish)) is wish
    assert copy.deepcopy(found)[_private.PASS_KEY] is wish


def test_the_name_alone_turns_the_whole_graph_route_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import sp_passes_vllm

    monkeypatch.delenv(config.ENV, raising=False)
    wrapper = _wrapper({})
    passes = wrapper.vllm_config.compilation_config.inductor_compile_config
    passes[_private.PASS_KEY] = sp_passes_vllm.whole_graph
    session = plugin.session_of(wrapper)
    assert session is not None and session.options.routes == ("graph",)


@pytest.mark.parametrize(
    ("given", "tp_size"), [({}, 1), ({"sp_passes": False}, 2), ({"sp_passes": None}, 2)]
)
def test_the_name_alone_compiles_nothing_where_the_pass_is_off(
    given: dict[str, Any], tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is named in the configuration would end the compilation with an error."""
    import sp_passes_vllm

    monkeypatch.delenv(config.ENV, raising=False)
    wrapper = _wrapper(given, tp_size)
    passes = wrapper.vllm_config.compilation_config.inductor_compile_config
    passes[_private.PASS_KEY] = sp_passes_vllm.whole_graph
    assert plugin.session_of(wrapper) is None and passes == {}


def test_the_name_with_the_regional_route_compiles_nothing() -> None:
    import sp_passes_vllm

    wrapper = _wrapper({"sp_passes": {"routes": ["regional"]}})
    passes = wrapper.vllm_config.compilation_config.inductor_compile_config
    passes[_private.PASS_KEY] = sp_passes_vllm.whole_graph
    assert plugin.session_of(wrapper) is not None and passes == {}


def test_the_pass_without_the_plugin_says_so() -> None:
    import sp_passes_vllm

    with pytest.raises(RuntimeError, match="leave VLLM_PLUGINS unset"):
        sp_passes_vllm.whole_graph(None)
