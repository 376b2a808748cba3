"""Names that generated Python cannot have in public: keywords of functions, attributes of classes.

Where a name meets a word inside of generated text, ``fusegen.hygiene`` tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..ir.naming import is_derived
from ..math import is_reserved
from ..spec.diagnostics import Problem
from ..spec.load import Source
from ..spec.op import OpSpec


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODULE_ATTRIBUTES = _words(
    """
    add_module apply bfloat16 buffers call_super_init children compile cpu cuda double
    dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter
    get_submodule half ipu load_state_dict modules mtia named_buffers named_children
    named_modules named_parameters parameters register_backward_hook register_buffer
    register_forward_hook register_forward_pre_hook register_full_backward_hook
    register_full_backward_pre_hook register_load_state_dict_post_hook
    register_load_state_dict_pre_hook register_module register_parameter
    register_state_dict_post_hook register_state_dict_pre_hook set_extra_state set_submodule
    share_memory state_dict to to_empty train training type xpu zero_grad
    """
)
"""What every ``torch.nn.Module`` has, as of PyTorch 2.13."""

CLASS_ATTRIBUTES = _words(
    """
    amax_group backward_dw describe held quantize_input
    refresh_weights reset_parameters reset_statistics
    statistics wgrad_queue
    """
)
"""What generated classes have besides."""

FUNCTION_KEYWORDS = frozenset(
    ("amax_group", "columnwise", "update_state", "wgrad_queue", "wgrad_weights")
)
"""What generated functions take besides tensors and scalars."""

CONSTRUCTOR_KEYWORDS = frozenset(("bias", "device", "dtype", "max_in_flight", "max_tokens"))
"""What the constructor of a module with parameters takes besides sizes and scalars."""

PYTHON_WORDS = frozenset(("self", "super"))
"""Words that no alias replaces."""

FILE_WORDS = _words(
    """
    Callable FORMAT Literal NamedTuple OUTPUT_FORMAT ProcessGroup Quantized QuantizedTensor Role
    TYPE_CHECKING Tensor WgradQueue
    False None True backward_dw bool callable dequantize dict filter float getattr int
    isinstance len list map math next nn object property quantize_input
    quantized reference refresh_weights
    repr set setattr slice staticmethod str super torch tuple type zip NoReturn
    """
)
"""Words of a generated file beside which its function and its class stand."""


def taken_by_python(name: str) -> str:
    """Why no argument can have a name; empty where one can."""
    if is_reserved(name):
        return "is a reserved word"
    if name in PYTHON_WORDS:
        return "is what methods of Python are written with"
    return ""


def taken_by_function(name: str) -> str:
    """Why a generated function can have no argument of a name; empty where it can."""
    if name in FUNCTION_KEYWORDS:
        return "is another argument of generated functions"
    if is_derived(name):
        return "is a name that is made for what is derived of another tensor"
    return taken_by_python(name)


def taken_by_class(name: str) -> str:
    """Why a generated class can have no attribute of a name; empty where it can."""
    if name in MODULE_ATTRIBUTES:
        return "is an attribute of every torch.nn.Module"
    if name in CLASS_ATTRIBUTES:
        return "is an attribute of generated modules"
    return taken_by_function(name)


def check_public_names(
    dims: Mapping[str, str], own: Mapping[str, tuple[str | int, ...]], full: bool, source: Source
) -> Iterator[Problem]:
    """Keywords of sizes, and what else is an attribute of the class.

    Args:
        dims: symbols and keywords.
        own: further attributes of the class, and where each stands.
        full: whether the constructor has all its keywords, as one with parameters does.
        source: of the spec.
    """
    places: dict[str, tuple[str | int, ...]] = {word: ("dims", s) for s, word in dims.items()}
    for name, place in (*places.items(), *own.items()):
        reason = taken_by_class(name)
        if not reason and full and name in CONSTRUCTOR_KEYWORDS:
            reason = "is another argument of the constructor"
        if reason:
            yield source.problem(f"{name!r} {reason}; choose another name", *place)
    for name in sorted(places.keys() & own.keys()):
        yield source.problem(
            f"{name!r} is also the keyword of a dimension; choose another", *own[name]
        )


def takes_all_keywords(op: OpSpec) -> bool:
    """Whether a class with this op has parameters, or state for what it quantises."""
    roles = (tensor.role for tensor in op.tensors.values())
    return bool(op.parameters) or any(roles)
