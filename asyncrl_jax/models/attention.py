"""Grouped-query attention of one layer: projections, and softmax attention over packed rows or over a cache.

What sets the families apart is data (`AttentionSpec`): normalised queries and keys, biases, clipping, partial rotation,
values of another width, sliding windows and attention sinks.

Dimensions: B rows, T query positions, S key positions, D hidden width, H query heads, G key/value heads, R query heads
of one key/value head (H = G·R), K width of a query or key head, U width of a value head.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from asyncrl_jax.config_model import ModelConfig
from asyncrl_jax.models.cpu.attention import Segments, attend_row, attend_rows
from asyncrl_jax.models.cpu.features import normalise_features, project_in, project_out, turn_heads
from asyncrl_jax.models.cpu.norm import normalise
from asyncrl_jax.models.rotary import Rotary, rotate

MASKED = -1e30  # finite: a row with nothing to attend to must not become NaN


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) · scale` over the last dimensions, those of `scale`; computed in float32."""
    if x.dtype == jnp.float32 and _on_one_cpu():
        return normalise(x.reshape(-1, scale.size), scale.reshape(-1), eps).reshape(x.shape)
    axes = tuple(range(-scale.ndim, 0))
    wide = x.astype(jnp.float32)  # squares of bfloat16 lose what the mean needs
    variance = jnp.mean(jnp.square(wide), axis=axes, keepdims=True)
    normed = wide * jax.lax.rsqrt(variance + eps) * jnp.expand_dims(scale, range(x.ndim - scale.ndim))
    return normed.astype(x.dtype)


# ------------------------------------------------------------------------------------------------------------- softmax


def attend_packed(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGU: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    window: int = 0,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Causal attention within the segments of packed rows; returns [B, T, H, U].

    Args:
      q_BTHK: queries; query head h uses key/value head h // R.
      k_BTGK: keys.
      v_BTGU: values.
      segment_ids_BT: int32; a position sees those of its own segment, up to itself. Segments are contiguous.
      window: positions that one sees, itself included; 0 for all.
      sinks_H: a logit of each head that takes probability and gives nothing.
    """
    # Kernels are picked here and in `_attend`, and nowhere else.
    if _by_rows(q_BTHK.dtype, q_BTHK.shape[-1], v_BTGU.shape[-1], window, has_sinks=sinks_H is not None):
        return attend_rows(q_BTHK, k_BTGK, v_BTGU, segment_ids_BT)
    mask_BTT = packed_mask(segment_ids_BT, window)
    return _attend(q_BTHK, k_BTGK, v_BTGU, mask_BTT, sinks_H)


def _by_rows(dtype: jnp.dtype, head_dim: int, v_head_dim: int, window: int, *, has_sinks: bool) -> bool:
    """Whether the kernel for one CPU core serves. It goes row by row, and so not where rows lie on several devices."""
    return window == 0 and not has_sinks and dtype == jnp.float32 and head_dim == v_head_dim and _on_one_cpu()


def _on_one_cpu() -> bool:
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def attend_cached(
    q_BTHK: jax.Array,
    k_BGKS: jax.Array,
    v_BGSU: jax.Array,
    mask_BTS: jax.Array,
    *,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Attention of some queries of each row over its cache; returns [B, T, H, U].

    Args:
      q_BTHK: queries.
      k_BGKS: keys of the cache.
      v_BGSU: values of the cache.
      mask_BTS: bool; what each query sees.
      sinks_H: see `attend_packed`.
    """
    if jax.default_backend() == "cpu":
        return _attend_heads(q_BTHK, k_BGKS, v_BGSU, mask_BTS, sinks_H)
    k_BSGK, v_BSGU = k_BGKS.transpose(0, 3, 1, 2), v_BGSU.transpose(0, 2, 1, 3)
    return attend_library(q_BTHK, k_BSGK, v_BSGU, mask_BTS, sinks_H)


def packed_mask(segment_ids_BT: jax.Array, window: int = 0) -> jax.Array:
    """bool [B, T, T]: query t may see key s if both are of one segment and t − window < s ≤ t (window 0: any s ≤ t)."""
    same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    distance_TS = jnp.arange(segment_ids_BT.shape[1])[:, None] - jnp.arange(segment_ids_BT.shape[1])[None, :]
    near_TS = (distance_TS >= 0) & (distance_TS < window) if window else distance_TS >= 0
    return same_BTS & near_TS[None]


def _attend(
    q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGU: jax.Array, mask_BTS: jax.Array, sinks_H: jax.Array | None
) -> jax.Array:
    """Picks the version by platform."""
    if jax.default_backend() == "cpu":
        return attend_einsum(q_BTHK, k_BSGK, v_BSGU, mask_BTS, sinks_H)
    return attend_library(q_BTHK, k_BSGK, v_BSGU, mask_BTS, sinks_H)


def attend_einsum(
    q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGU: jax.Array, mask_BTS: jax.Array, sinks_H: jax.Array | None
) -> jax.Array:
    """Softmax attention as two products, in float32 between them; returns [B, T, H, U]. The reference, and for CPUs."""
    return _attend_heads(q_BTHK, k_BSGK.transpose(0, 2, 3, 1), v_BSGU.transpose(0, 2, 1, 3), mask_BTS, sinks_H)


def _attend_heads(
    q_BTHK: jax.Array, k_BGKS: jax.Array, v_BGSU: jax.Array, mask_BTS: jax.Array, sinks_H: jax.Array | None
) -> jax.Array:
    """`attend_einsum` of keys and values as a cache holds them."""
    batch, length, num_heads, head_dim = q_BTHK.shape
    num_kv_heads, num_keys = v_BGSU.shape[1:3]
    q_BTGRK = q_BTHK.reshape(batch, length, num_kv_heads, -1, head_dim) * head_dim**-0.5
    q_BGJK = q_BTGRK.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, -1, head_dim)
    # Left as they are, the products read keys and values along their rows; an `einsum` turns them around.
    scores_BGJS = jnp.matmul(q_BGJK, k_BGKS, preferred_element_type=jnp.float32)
    scores_BGRTS = scores_BGJS.reshape(batch, num_kv_heads, -1, length, num_keys)
    scores_BGRTS = jnp.where(mask_BTS[:, None, None], scores_BGRTS, MASKED)
    # Normalising the output instead of the probabilities halves the time of the whole gradient on CPU.
    largest_BGRT1 = jax.lax.stop_gradient(jnp.max(scores_BGRTS, axis=-1, keepdims=True))
    sinks_1GR11 = None if sinks_H is None else sinks_H.reshape(1, num_kv_heads, -1, 1, 1)
    if sinks_1GR11 is not None:
        largest_BGRT1 = jnp.maximum(largest_BGRT1, jax.lax.stop_gradient(sinks_1GR11))
    weights_BGRTS = jnp.exp(scores_BGRTS - largest_BGRT1)
    sums_BGRT1 = jnp.sum(weights_BGRTS, axis=-1, keepdims=True)
    if sinks_1GR11 is not None:
        sums_BGRT1 += jnp.exp(sinks_1GR11 - largest_BGRT1)
    output_BGJU = jnp.matmul(weights_BGRTS.astype(v_BGSU.dtype).reshape(scores_BGJS.shape), v_BGSU)
    output_BGRTU = output_BGJU.reshape(*scores_BGRTS.shape[:4], -1)
    output_BGRTU = (output_BGRTU / sums_BGRT1).astype(v_BGSU.dtype)
    return output_BGRTU.transpose(0, 3, 1, 2, 4).reshape(batch, length, num_heads, -1)


def attend_library(
    q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGU: jax.Array, mask_BTS: jax.Array, sinks_H: jax.Array | None
) -> jax.Array:
    """The same by `jax.nn.dot_product_attention`, for accelerators: cuDNN's flash attention where that applies.

    The library wants keys and values of one width, so the narrower ones are padded with zeros, which changes nothing.
    It knows no sinks: they are one more key and value, both zeros, with the sink as the bias of its scores.
    """
    key_dim, value_dim = k_BSGK.shape[-1], v_BSGU.shape[-1]
    q_BTHK, k_BSGK, v_BSGU = (_pad_last(x, max(key_dim, value_dim)) for x in (q_BTHK, k_BSGK, v_BSGU))
    mask_B1TS, bias_1H1S = mask_BTS[:, None], None
    if sinks_H is not None:
        k_BSGK, v_BSGU = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k_BSGK, v_BSGU))
        mask_B1TS = jnp.pad(mask_B1TS, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=True)
        sinks_1H11 = sinks_H.astype(q_BTHK.dtype)[None, :, None, None]
        bias_1H1S = jnp.pad(sinks_1H11, ((0, 0), (0, 0), (0, 0), (mask_BTS.shape[-1], 0)))
    output_BTHU = jax.nn.dot_product_attention(
        q_BTHK,
        k_BSGK,
        v_BSGU,
        bias_1H1S,
        mask_B1TS,
        scale=key_dim**-0.5,
        implementation="xla" if sinks_H is not None else _flash_where_it_applies(q_BTHK),
    )
    return output_BTHU[..., :value_dim]


def _flash_where_it_applies(q_BTHK: jax.Array) -> Literal["cudnn", "xla"]:
    """cuDNN takes bfloat16 and heads of up to 128, a multiple of 8."""
    fits = q_BTHK.dtype == jnp.bfloat16 and q_BTHK.shape[-1] % 8 == 0 and q_BTHK.shape[-1] <= 128
    return "cudnn" if fits and jax.default_backend() == "gpu" else "xla"


def _pad_last(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


# --------------------------------------------------------------------------------------------------------- one layer


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention is."""

    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary: Rotary
    window: int  # positions that one sees, itself included; 0 for all
    sinks: bool
    value_scale: float
    qk_norm: str
    qkv_bias: bool
    output_bias: bool
    clip: float
    norm_eps: float
    init_std: float

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> AttentionSpec:
        """That of layer `layer`."""
        a, slides = config.attention, config.is_sliding(layer)
        theta = a.sliding_rope_theta if slides and a.sliding_rope_theta else config.rope_theta
        return cls(
            hidden_dim=config.hidden_dim,
            num_heads=config.num_heads,
            num_kv_heads=a.sliding_kv_heads if slides and a.sliding_kv_heads else config.num_kv_heads,
            head_dim=config.head_dim,
            v_head_dim=a.v_head_dim or config.head_dim,
            rotary=Rotary(int(config.head_dim * a.rotary_share), theta, config.rope_scaling),
            window=a.window if slides else 0,
            sinks=a.sinks and slides,
            value_scale=a.value_scale,
            qk_norm=a.qk_norm,
            qkv_bias=a.qkv_bias,
            output_bias=a.output_bias,
            clip=a.clip,
            norm_eps=config.norm_eps,
            init_std=config.init_std,
        )


class Attention(nnx.Module):
    """Projections of one attention layer. Weights are float32 and used in the dtype of what they multiply."""

    def __init__(self, spec: AttentionSpec, rngs: nnx.Rngs):
        s, init = spec, nnx.initializers.normal(spec.init_std)
        self.spec = spec
        self.q_proj = nnx.Param(init(rngs.params(), (s.hidden_dim, s.num_heads, s.head_dim)))
        self.k_proj = nnx.Param(init(rngs.params(), (s.hidden_dim, s.num_kv_heads, s.head_dim)))
        self.v_proj = nnx.Param(init(rngs.params(), (s.hidden_dim, s.num_kv_heads, s.v_head_dim)))
        self.o_proj = nnx.Param(init(rngs.params(), (s.num_heads, s.v_head_dim, s.hidden_dim)))
        if s.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros((s.num_heads, s.head_dim)))
            self.k_bias = nnx.Param(jnp.zeros((s.num_kv_heads, s.head_dim)))
            self.v_bias = nnx.Param(jnp.zeros((s.num_kv_heads, s.v_head_dim)))
        if s.output_bias:
            self.o_bias = nnx.Param(jnp.zeros(s.hidden_dim))
        if s.qk_norm != "none":
            of_head = s.qk_norm == "head"
            self.q_norm = nnx.Param(jnp.ones(s.head_dim if of_head else (s.num_heads, s.head_dim)))
            self.k_norm = nnx.Param(jnp.ones(s.head_dim if of_head else (s.num_kv_heads, s.head_dim)))
        if s.sinks:
            self.sinks = nnx.Param(jnp.zeros(s.num_heads))

    def __call__(self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """[B, T, D] of packed rows: projected, attended to (see `attend_packed`), and projected back."""
        s = self.spec
        if _by_rows(x_BTD.dtype, s.head_dim, s.v_head_dim, s.window, has_sinks=s.sinks):
            return self._by_features(x_BTD, positions_BT, segment_ids_BT)
        q_BTHK, k_BTGK, v_BTGU = self.project(x_BTD, positions_BT)
        heads_BTHU = attend_packed(q_BTHK, k_BTGK, v_BTGU, segment_ids_BT, window=s.window, sinks_H=self.sink_logits())
        return self.output(heads_BTHU)

    def _by_features(self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """The same by the kernels for one CPU core, row by row, so that what lies between stays in the cache."""
        s = self.spec
        projections = (self.q_proj[...], self.k_proj[...], self.v_proj[...])
        in_ED = jnp.concatenate([self._grouped(w_DHK, 1).reshape(s.hidden_dim, -1).T for w_DHK in projections])
        out_ED = self._grouped(self.o_proj[...], 0).reshape(-1, s.hidden_dim)

        angles_BKT = s.rotary.frequencies()[None, :, None] * positions_BT[:, None].astype(jnp.float32)
        segments = Segments.of(segment_ids_BT, s.num_heads // s.num_kv_heads)

        def row(arrays: tuple[Any, ...]) -> jax.Array:
            x_TD, cos_KT, sin_KT, segments = arrays
            q, k, v = self._features(project_in(x_TD, in_ED), cos_KT, sin_KT)
            heads_GKRT = attend_row(q, k[:, :, 0], v[:, :, 0], segments)
            return project_out(heads_GKRT.reshape(len(out_ED), -1), out_ED)

        y_BTD = jax.lax.map(row, (x_BTD, jnp.cos(angles_BKT), jnp.sin(angles_BKT), segments))
        return y_BTD + self.o_bias[...][None, None] if s.output_bias else y_BTD

    def _features(
        self, features_ET: jax.Array, cos_KT: jax.Array, sin_KT: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(q_GKRT, k_GK1T, v_GK1T) of projections, ready to attend."""
        s = self.spec

        def normed(x_GKRT: jax.Array, scale: jax.Array) -> jax.Array:
            scale_F = scale if s.qk_norm == "head" else self._grouped(scale, 0).reshape(-1)
            num_norms = s.num_kv_heads if s.qk_norm == "head" else 1
            x_MFJ = x_GKRT.reshape(num_norms, len(scale_F), -1)
            return normalise_features(x_MFJ, scale_F, s.norm_eps).reshape(x_GKRT.shape)

        ends = s.num_heads * s.head_dim, (s.num_heads + s.num_kv_heads) * s.head_dim
        shape = (s.num_kv_heads, s.head_dim, -1, features_ET.shape[1])
        q, k, v = (x_ET.reshape(shape) for x_ET in jnp.split(features_ET, ends))
        if s.qkv_bias:
            biases = (self.q_bias[...], self.k_bias[...], self.v_bias[...])
            q, k, v = (x + self._grouped(bias, 0)[..., None] for x, bias in zip((q, k, v), biases, strict=True))
        if s.qk_norm != "none":
            q, k = normed(q, self.q_norm[...]), normed(k, self.k_norm[...])
        if s.clip:
            q, k, v = (jnp.clip(x, -s.clip, s.clip) for x in (q, k, v))
        return turn_heads(q, cos_KT, sin_KT), turn_heads(k, cos_KT, sin_KT), v * s.value_scale

    def _grouped(self, of_heads: jax.Array, axis: int) -> jax.Array:
        """Its axes [H, K], the first of which is `axis`, as [G, K, R]."""
        shape = of_heads.shape
        split = of_heads.reshape(*shape[:axis], self.spec.num_kv_heads, -1, *shape[axis + 1 :])
        return jnp.swapaxes(split, axis + 1, axis + 2)

    def project(self, x_BTD: jax.Array, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(q_BTHK, k_BTGK, v_BTGU), ready to attend."""
        s, dtype = self.spec, x_BTD.dtype
        q_BTHK = jnp.einsum("BTD,DHK->BTHK", x_BTD, self.q_proj[...].astype(dtype))
        k_BTGK = jnp.einsum("BTD,DGK->BTGK", x_BTD, self.k_proj[...].astype(dtype))
        v_BTGU = jnp.einsum("BTD,DGU->BTGU", x_BTD, self.v_proj[...].astype(dtype))
        if s.qkv_bias:
            q_BTHK += self.q_bias[...].astype(dtype)[None, None]
            k_BTGK += self.k_bias[...].astype(dtype)[None, None]
            v_BTGU += self.v_bias[...].astype(dtype)[None, None]
        if s.qk_norm != "none":
            q_BTHK = rms_norm(q_BTHK, self.q_norm[...], s.norm_eps)
            k_BTGK = rms_norm(k_BTGK, self.k_norm[...], s.norm_eps)
        if s.clip:
            q_BTHK, k_BTGK, v_BTGU = (jnp.clip(x, -s.clip, s.clip) for x in (q_BTHK, k_BTGK, v_BTGU))
        q_BTHK, k_BTGK = (rotate(x, positions_BT, s.rotary) for x in (q_BTHK, k_BTGK))
        return q_BTHK, k_BTGK, v_BTGU * s.value_scale if s.value_scale != 1.0 else v_BTGU

    def sink_logits(self) -> jax.Array | None:
        """float32 [H], or None for a layer without sinks."""
        return self.sinks[...] if self.spec.sinks else None

    def output(self, heads_BTHU: jax.Array) -> jax.Array:
        """[B, T, D] of what the heads saw."""
        y_BTD = jnp.einsum("BTHU,HUD->BTD", heads_BTHU, self.o_proj[...].astype(heads_BTHU.dtype))
        return y_BTD + self.o_bias[...].astype(y_BTD.dtype)[None, None] if self.spec.output_bias else y_BTD
