"""Test the plugin of simonw/llm; scripts/platform/check_libraries.py tests its command line with a real model."""

import shutil
from pathlib import Path

import pytest

llm = pytest.importorskip("llm", reason="needs the extra localllm[llm]")


def test_plugin_models_answer_and_continue_a_conversation(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copy(tiny, tmp_path / "small.gguf")
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path))
    from localllm.compat import llm_plugin

    names = list[str]()
    llm_plugin.register_models(lambda model: names.append(model.model_id))
    assert "localllm/small" in names and "localllm/qwen3-4b" in names and not any("embed" in name for name in names)
    llm_plugin.register_embedding_models(lambda model: names.append(model.model_id))
    assert "localllm/nomic-embed-text-1.5" in names
    chat = llm_plugin.LocalllmModel("small").conversation()
    first = chat.prompt("Hi", system="Be brief.", max_tokens=4, temperature=0)
    assert len([*first]) >= 1 and first.usage().output == 4
    second = chat.prompt("And?", max_tokens=4, temperature=0, stream=False)
    messages = [(each["role"], each["content"]) for each in llm_plugin.convert_messages(second.prompt)]
    assert messages == [("system", "Be brief."), ("user", "Hi"), ("assistant", first.text()), ("user", "And?")]
    with pytest.raises(llm.ModelError, match="localllm pull qwen3-4b"):
        llm_plugin.LocalllmModel("qwen3-4b").prompt("Hi").text()
    llm_plugin.open_once("small").close()
