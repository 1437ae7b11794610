"""The cost of a token: bytes of weights and multiplications."""

from collections.abc import Mapping
from math import prod

from localllm.arch.weights import Weights
from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.frozen import frozen


@frozen
class MatrixCosts:
    """Costs of a model's matrix products, by matrix; norms and attention are not counted."""

    weight_bytes: int  # read for one token of decode
    per_token: int  # multiply-adds of all matrices but the output matrix
    per_logits: int  # multiply-adds of the output matrix, for a token whose logits are made

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], experts_used: int = 0) -> "MatrixCosts":
        """Sum the costs of tensors; experts_used: experts per token. Raises ModelError.

        The embedding matrix is not counted, since only one row is read, unless it is the output matrix, too.
        """
        weights = Weights(tensors)
        output = (weights.get("output") or weights.token_embd).tensor
        ends = {"token_embd.weight", output.name}
        experts = [tensor for tensor in tensors.values() if "_exps." in tensor.name and len(tensor.shape) == 3]
        matrices = [tensor for tensor in tensors.values() if len(tensor.shape) > 1 and tensor.name not in ends]
        layers = [tensor for tensor in matrices if tensor not in experts]
        return cls(
            output.nbytes
            + sum(tensor.nbytes for tensor in layers)
            + sum(tensor.nbytes // tensor.shape[0] * experts_used for tensor in experts),
            sum(prod(tensor.shape) for tensor in layers)
            + sum(prod(tensor.shape[1:]) * experts_used for tensor in experts),
            prod(output.shape),
        )

    @classmethod
    def of_file(cls, file: GGUFFile) -> "MatrixCosts":
        """Sum the costs of a model file. Raises ModelError."""
        arch = file.metadata.get("general.architecture")
        used_experts = file.metadata.get(f"{arch}.expert_used_count", 0)
        return cls.of(file.tensors, used_experts if isinstance(used_experts, int) else 0)
