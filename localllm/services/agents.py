"""Configure coding agents to use a localllm server.

The settings are passed as environment variables and arguments of a single start; no configuration file is changed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.services.remote.http import Endpoint, EndpointError, as_count, as_objects

NO_KEY = "localllm"  # for agents that require a key although the server needs none


@frozen
class AgentServer:
    """The server that an agent uses.

    Attributes:
        url: without /v1.  key: the API key, or NO_KEY.  model: its name.  context: in tokens, None if unknown.
    """

    url: str
    key: str
    model: str
    context: int | None = None


@frozen
class AgentSettings:
    """An agent's settings: environment variables, and arguments placed before the user's."""

    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()


@frozen
class Agent:
    """A coding agent: its program, the command that installs it, and its settings."""

    program: str
    install: str
    configure: Callable[[AgentServer], AgentSettings]


def configure_claude(provider: AgentServer) -> AgentSettings:
    """Configure Claude Code. Source: https://docs.claude.com/en/docs/claude-code/settings (environment variables)."""
    names = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    return AgentSettings({
        "ANTHROPIC_BASE_URL": provider.url, "ANTHROPIC_AUTH_TOKEN": provider.key, "ANTHROPIC_API_KEY": "",
        **{f"ANTHROPIC_{name}": provider.model for name in names},
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line of the system message that differs in each request
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    })  # fmt: skip


def configure_codex(provider: AgentServer) -> AgentSettings:
    """Configure Codex. Source: https://github.com/openai/codex/blob/main/docs/config.md."""
    settings = {
        "name": "localllm",
        "base_url": f"{provider.url}/v1",
        "wire_api": "responses",
        "env_key": "LOCALLLM_API_KEY",
    }
    arguments = ["-m", provider.model, "-c", 'model_provider="localllm"']
    for name, value in settings.items():
        arguments += ["-c", f"model_providers.localllm.{name}={json.dumps(value)}"]
    if provider.context:
        arguments += ["-c", f"model_context_window={provider.context}"]
    return AgentSettings({"LOCALLLM_API_KEY": provider.key}, arguments)


def configure_opencode(provider: AgentServer) -> AgentSettings:
    """Configure OpenCode. Source: https://opencode.ai/docs/config and /docs/providers."""
    limit = {"limit": {"context": provider.context, "output": provider.context // 4}} if provider.context else {}
    described = {
        "npm": "@ai-sdk/openai-compatible", "name": "localllm", "models": {provider.model: limit},
        "options": {"baseURL": f"{provider.url}/v1", "apiKey": provider.key},
    }  # fmt: skip
    name = f"localllm/{provider.model}"
    config = {"provider": {"localllm": described}, "model": name, "small_model": name}
    return AgentSettings({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def configure_qwen(provider: AgentServer) -> AgentSettings:
    """Configure Qwen Code. Source: https://github.com/QwenLM/qwen-code (README, authentication)."""
    variables = {"BASE_URL": f"{provider.url}/v1", "API_KEY": provider.key, "MODEL": provider.model}
    return AgentSettings({f"OPENAI_{name}": value for name, value in variables.items()}, ["--auth-type", "openai"])


def configure_aider(provider: AgentServer) -> AgentSettings:
    """Configure aider. Source: https://aider.chat/docs/llms/openai-compat.html."""
    return AgentSettings(
        {"OPENAI_API_BASE": f"{provider.url}/v1", "OPENAI_API_KEY": provider.key},
        ["--model", f"openai/{provider.model}", "--no-show-model-warnings"],
    )


def configure_mini(provider: AgentServer) -> AgentSettings:
    """Configure mini-SWE-agent. Source: https://mini-swe-agent.com/latest/models/local_models."""
    extra = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    variables = {"OPENAI_API_BASE": f"{provider.url}/v1", "OPENAI_API_KEY": provider.key, **extra}
    return AgentSettings(variables, ["--model", f"openai/{provider.model}", "--cost-limit", "0"])


AGENTS = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", configure_claude),
    "codex": Agent("codex", "npm install -g @openai/codex", configure_codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", configure_opencode),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", configure_qwen),
    "aider": Agent("aider", "pip install aider-chat", configure_aider),
    "mini": Agent("mini", "pip install mini-swe-agent", configure_mini),
}


def find_provider(url: str, key: str | None, model: str | None) -> AgentServer:
    """Return a server's model; model: its name, None for the first. Raises EndpointError, UsageError if missing."""
    endpoint = Endpoint.parse(url, key)
    try:
        models = as_objects(endpoint.get("/props").get("models"))
    except EndpointError as error:
        raise EndpointError(f"{error}; start a server with: localllm serve MODEL") from None
    served = {str(each.get("name")): as_count(each.get("context")) or None for each in models}
    name = model or next(iter(served), "")
    if name not in served:
        raise UsageError(f"{url} does not serve model {name}; available: {', '.join(served)}")
    return AgentServer(endpoint.url.removesuffix("/v1"), key or NO_KEY, name, served[name])
