"""llama-server's endpoint /lora-adapters: GET lists adapters, POST sets their scales.

Source: https://github.com/ggml-org/llama.cpp/tree/master/tools/server
"""

from starlette.requests import Request
from starlette.responses import Response

from localllm.engine.adapter_scales import strip_trailing_zeros
from localllm.errors import UsageError
from localllm.generation.adapters import order_scales, parse_scales
from localllm.server import http
from localllm.server.service import ServerContext


async def list_adapters(service: ServerContext, request: Request) -> Response:
    """List a model's adapters with their ids and the scales that requests have without a field `lora`."""
    async with service.pool.use(request.query_params.get("model")) as worker:
        engine = worker.model.engine
        scales = [*engine.adapter_scales, *[0.0] * len(engine.adapters)]
        adapters = [
            {"id": number, "name": adapter.name, "path": adapter.path, "scale": scales[number]}
            for number, adapter in enumerate(engine.adapters)
        ]
    return http.make_json_response(adapters)


async def set_scales(service: ServerContext, request: Request) -> Response:
    """Set the scales of requests without a field `lora`; those of adapters that the body does not name become 0."""
    scales = parse_scales(await http.read_list(request, service.limits))
    if scales is None:
        raise UsageError('the body must be an array of objects such as {"id": 0, "scale": 0.5}')
    async with service.pool.use(request.query_params.get("model")) as worker:
        engine = worker.model.engine
        engine.adapter_scales = strip_trailing_zeros(order_scales(engine, scales))
    return http.make_json_response({"success": True})
