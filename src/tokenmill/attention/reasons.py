"""Why a backend cannot serve a layer, in words that backends share."""

from __future__ import annotations

from tokenmill.attention.backend import AttentionSpec


def shape_reasons(spec: AttentionSpec, max_head_size: int | None = None) -> list[str]:
    """Why heads cannot be served that share KV heads, and have at most some size."""
    reasons = []
    if max_head_size is not None and spec.head_size > max_head_size:
        reasons.append(f"head size {spec.head_size} is above {max_head_size}")
    if spec.num_heads % spec.num_kv_heads:
        reasons.append(
            f"{spec.num_heads} heads cannot be shared among {spec.num_kv_heads} KV heads"
        )
    return reasons


def dtype_reasons(
    spec: AttentionSpec, dtypes: tuple[str, ...], kv_dtypes: tuple[str, ...] = ()
) -> list[str]:
    """Why the dtypes cannot be served; the cache may have the queries', or one of `kv_dtypes`."""
    reasons = []
    if spec.dtype not in dtypes:
        reasons.append(f"dtype {spec.dtype!r} is not one of {', '.join(dtypes)}")
    if spec.kv_dtype not in (None, spec.dtype, *kv_dtypes):
        others = "".join(f" or {name}" for name in kv_dtypes)
        reasons.append(f"KV dtype {spec.kv_dtype} is not dtype {spec.dtype}{others}")
    return reasons


def no_sinks_reasons(spec: AttentionSpec) -> list[str]:
    """Why a backend without sinks cannot serve `spec`."""
    return ["it has no attention sinks"] if spec.has_sinks else []


def no_latents_reasons(spec: AttentionSpec) -> list[str]:
    """Why a backend that stores the values of every key cannot serve `spec`."""
    if spec.value_offset is None:
        return []
    return ["it stores keys and values apart, and this layer's values are parts of its keys"]


def exact_reasons(spec: AttentionSpec) -> list[str]:
    """Why a library that splits work by the size of the batch cannot serve `spec`."""
    if not spec.exact:
        return []
    return ["its sums depend on the batch: it needs exact=False"]
