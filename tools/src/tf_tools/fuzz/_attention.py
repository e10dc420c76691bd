"""Attention: query, key and value projections of one input, or parts of one packed projection, up to the output projection."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tf_tools.fuzz._mlp import start
from tf_tools.fuzz._program import HEAD_DIM, HIDDEN, Program
from tf_tools.fuzz._text import INSTANCES, class_text
from tf_tools.fuzz._writer import Writer

Draw = Callable[[st.SearchStrategy[Any]], Any]
PARTS = ("q", "k", "v")


@st.composite
def attentions(draw: Draw) -> Program:
    """Modules with three projections."""
    w, arguments = start(draw)
    heads, kv_heads = w.pick((4, 2), (4, 4), (4, 1), (2, 2))
    names = w.pick(("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj", "q_proj"), ("query", "key", "value"))
    linears = dict(zip(PARTS, names, strict=True))
    given = w.x
    shape = _begin(w)
    states: dict[str, str] = {}
    style = w.pick("each", "each", "projections first")
    for part in w.pick(("q", "k", "v"), ("k", "v", "q"), ("v", "q", "k"), ("q", "v", "k")):
        projected = w.layer(linears[part], w.source())
        if style == "each":
            states[part] = w.bind(_by_heads(w, projected, shape, heads if part == "q" else kv_heads), f"{part}_states")
        else:
            states[part] = w.bind(projected, f"{part}_states")
        w.gap()
    if style == "projections first":
        for part in PARTS:
            states[part] = w.bind(_by_heads(w, states[part], shape, heads if part == "q" else kv_heads), part)
            w.gap()
    if not w.is_calm and w.rarely(10):
        swap = w.pick(("k", "v"), ("q", "k"), ("v", "k"))
        states[swap[0]] = states[swap[1]]
    return _finished(
        w,
        states,
        arguments,
        given,
        shape,
        heads,
        kv_heads,
        f"""
        self.{linears["q"]} = nn.Linear({HIDDEN}, {heads * HEAD_DIM}, bias=bias)
        self.{linears["k"]} = nn.Linear({HIDDEN}, {kv_heads * HEAD_DIM}, bias=bias)
        self.{linears["v"]} = nn.Linear({HIDDEN}, {kv_heads * HEAD_DIM}, bias=bias or (other_bias and wide))
        {w.pick("", "", "", "", f"self.{linears['v']} = self.{linears['k']} if plain else self.{linears['v']}")}
    """,
    )


@st.composite
def packed_attentions(draw: Draw) -> Program:
    """Modules with query, key and value in one projection."""
    w, arguments = start(draw)
    heads, kv_heads = w.pick((4, 4), (4, 2), (4, 1), (2, 2))
    packed = w.pick("qkv_proj", "c_attn", "Wqkv")
    given = w.x
    shape = _begin(w)
    both = w.bind(w.layer(packed, w.source()), "qkv")
    w.gap()
    widths = [heads * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM]
    parts = _parts(w, both, widths, heads, kv_heads)
    if not w.is_calm and w.rarely(10):
        parts = [parts[at] for at in w.pick((1, 0, 2), (0, 2, 1), (0, 1, 1))]
    w.gap()
    states = {}
    for part, value in zip(PARTS, parts, strict=True):
        states[part] = w.bind(_by_heads(w, value, shape, heads if part == "q" else kv_heads), part)
        w.gap()
    kind = w.pick("nn.Linear({i}, {o}, bias=bias)", "nn.Linear({i}, {o}, bias=bias)", "Conv1D({o}, {i})")
    return _finished(
        w,
        states,
        arguments,
        given,
        shape,
        heads,
        kv_heads,
        f"""
        from transformers.pytorch_utils import Conv1D
        self.{packed} = {kind.format(i=HIDDEN, o=sum(widths))}
    """,
    )


def _begin(w: Writer) -> str:
    """Statements before the projections; the text of [batch, tokens]."""
    if w.rarely(6):
        w.put(w.pick(f"residual = {w.x}", f"{w.x} = {w.me}.norm({w.x})", f"given = {w.x}", f"{w.x} = {w.x} * 1.5"))
    form = w.pick("starred", "sizes", "shape", "size()")
    if form == "starred":
        w.put(f"input_shape = {w.x}.shape[:-1]")
        return "*input_shape"
    if form == "sizes":
        w.put(f"batch, tokens, _ = {w.x}.shape")
        return "batch, tokens"
    if form == "size()":
        w.put(f"batch, tokens = {w.x}.size()[:2]")
        return "batch, tokens"
    return f"{w.x}.shape[0], {w.x}.shape[1]"


def _by_heads(w: Writer, value: str, shape: str, heads: int) -> str:
    """[batch, tokens, features] as [batch, heads, tokens, head_dim]."""
    me = w.me
    number = w.pick("-1", "-1", f"{value_width(heads)} // {me}.head_dim", str(heads))
    dim = w.pick(f"{me}.head_dim", f"{me}.head_dim", str(HEAD_DIM))
    viewed = w.pick(
        f"{value}.view({shape}, {number}, {dim})",
        f"{value}.reshape({shape}, {number}, {dim})",
        f"{value}.view(({shape}, {number}, {dim}))",
        f"{value}.unflatten(-1, ({number}, {dim}))",
        f"torch.reshape({value}, ({shape}, {number}, {dim}))",
    )
    if not w.is_calm and w.rarely(8):
        return f"{value}.view(-1, {HEAD_DIM}).view({shape}, -1, {HEAD_DIM}).transpose(1, 2)"
    if not w.is_calm and w.rarely(12):
        viewed = w.pick(f"{me}.head_norm({viewed})", f"{viewed}.contiguous()", f"{viewed} * 1.5", f"{viewed}.clone()")
    return w.pick(f"{viewed}.transpose(1, 2)", f"{viewed}.permute(0, 2, 1, 3)", f"torch.transpose({viewed}, 1, 2)")


def value_width(heads: int) -> str:
    """The width of a projection, spelled as a number."""
    return str(heads * HEAD_DIM)


def _parts(w: Writer, both: str, widths: list[int], heads: int, kv_heads: int) -> list[str]:
    q, k, v = widths
    me = w.me
    forms = [
        f"{both}.split([{q}, {k}, {v}], dim=-1)",
        f"torch.split({both}, ({q}, {k}, {v}), -1)",
        "slices",
        "slices",
        f"th.split({both}, [{q}, {k}, {v}], dim=-1)",
        f"torch.Tensor.split({both}, [{q}, {k}, {v}], -1)",
        f"torch.tensor_split({both}, ({q}, {q + k}), dim=-1)",
    ]
    if heads == kv_heads:
        forms += [
            f"{both}.chunk(3, dim=-1)",
            f"{both}.split({me}.inner, dim=2)",
            f"{both}.unflatten(-1, (3, -1)).unbind(-2)",
            f"{both}.unflatten(-1, (-1, 3, {HEAD_DIM})).unbind(-2)",
            f"{both}.split({both}.shape[-1] // 3, -1)",
        ]
    whole = w.pick(*forms)
    if whole == "slices":
        name = both if both.isidentifier() else "packed"
        if name != both:
            w.put(f"{name} = {both}")
        dots = w.pick("...", ":, :")
        cuts = w.pick((str(q), str(q + k)), (f"{me}.inner", f"{me}.inner + {k}"), (str(q), f"-{v}"))
        sliced = [f"{name}[{dots}, :{cuts[0]}]", f"{name}[{dots}, {cuts[0]}:{cuts[1]}]", f"{name}[{dots}, {cuts[1]}:]"]
        return [w.bind(part, f"{at}_part") for at, part in zip(PARTS, sliced, strict=True)]
    if w.rarely(4):
        w.put(f"parts = {whole}")
        return [f"parts[{at}]" for at in range(3)]
    names = [w.name(f"{part}_part") for part in PARTS]
    if len(set(names)) < 3:
        names = ["one", "two", "three"]
    w.put(f"{', '.join(names)} = {whole}")
    w.scope += names
    return names


def _finished(
    w: Writer, states: dict[str, str], arguments: str, given: str, shape: str, heads: int, kv_heads: int, init: str
) -> Program:
    """Rotary embedding, norms, the call of attention, the output projection."""
    me = w.me
    has_rotary = w.pick(False, True)
    for part in PARTS:
        if not states[part].isidentifier() and (has_rotary or w.rarely(3)):
            w.put(f"{part}_heads = {states[part]}")
            states[part] = f"{part}_heads"
    if w.rarely(4):
        states["q"] = w.bind(f"{me}.q_norm({states['q']})", "q_normed")
    if has_rotary:
        w.put("cos, sin = position_embeddings")
        q, k = states["q"], states["k"]
        if not q.isidentifier():
            w.put(f"q_heads = {q}")
            q = "q_heads"
        function = w.pick("apply_rotary", "apply_rotary", "apply_rotary_adjacent", "apply_rotary_half")
        turned = f"{function}({q}, {k}, cos, sin)"
        if not w.is_calm and w.rarely(4):
            turned = w.pick(
                f"apply_rotary({q}, {k}, cos, sin, unsqueeze_dim=1)",
                f"apply_rotary(k={k}, q={q}, cos=cos, sin=sin)",
                f"apply_rotary({q}, {k}, sin, cos)",
                f"apply_rotary({q}, {q}, cos, sin)",
                f"({q} * cos.unsqueeze(1) + rotate({q}) * sin.unsqueeze(1), {k})",
                f"apply_rotary({q}, {k}, cos * 1.1, sin)",
                f"apply_rotary(({q}).clone(), {k}, cos, sin)",
                f"(apply_rotary({q}, {k}, cos, sin)[0], {k})",
                f"apply_rotary({q}, {k} * 1.5, cos, sin)",
                f"apply_rotary_scaled({q}, {k}, cos, sin)",
                f"apply_rotary({q} + 0.0, {k}, cos, sin)",
            )
        if not w.is_calm and w.rarely(8):
            w.put(f"kept = {w.pick(q, k)}")
            w.extras.append("kept.mean()")
        call = f"{q}, {k} = {turned}"
        w.put(w.pick(call, call, f"if {me}.flag:\n    {call}", f"if {w.x}.shape[1] > 4:\n    {call}"))
        states["q"] = q
    w.gap()
    interface = f"ALL_ATTENTION_FUNCTIONS.get_interface({me}.config._attn_implementation, None)"
    if w.pick(True, False):
        w.put(f"attend = {interface}")
        interface = "attend"
    scaling = w.pick(f"{me}.scaling", "0.5")
    call = f"{interface}({me}, {states['q']}, {states['k']}, {states['v']}, None, scaling={scaling})"
    if w.pick(True, True, False):
        w.put(f"attended, weights = {call}")
    else:
        w.put(f"attended = {call}[0]")
    if not w.is_calm and w.rarely(16):
        w.put(f"again = {call}[0]\nattended = attended - 0.3 * again")
    w.scope.append("attended")
    w.gap()
    flat = w.pick(
        f"attended.reshape({shape}, -1)",
        f"attended.reshape({shape}, -1).contiguous()",
        "attended.flatten(2)",
        f"attended.reshape({shape}, {heads * HEAD_DIM})",
        f"attended.view({shape}, {me}.inner)",
    )
    out = w.bind(f"{me}.o_proj({w.bind(flat, 'flat')})", "out")
    out = w.pick(out, out, f"{out} + {given}")
    returned = w.pick("{0}", "{0}, None", "({0}, None)")
    w.put(f"return {returned.format(w.result(out))}")
    common = f"""
        self.o_proj = nn.Linear({heads * HEAD_DIM}, {HIDDEN}, bias=other_bias)
        self.head_dim, self.scaling, self.inner = {HEAD_DIM}, {HEAD_DIM**-0.5}, {heads * HEAD_DIM}
        self.norm, self.head_norm, self.q_norm = nn.LayerNorm({HIDDEN}), nn.LayerNorm({HEAD_DIM}), nn.LayerNorm({HEAD_DIM})
    """
    init = textwrap.dedent(init).strip() + "\n" + textwrap.dedent(common).strip()
    rotary = ", position_embeddings" if has_rotary else ""
    name, rest = arguments.split(",", 1) if "," in arguments else (arguments, "")
    arguments = f"{name}{rotary},{rest}" if rest else f"{name}{rotary}"
    kind = "packed_qkv" if "parts" in init else "qkv"
    return Program(kind, class_text(w.body(), init, w, arguments=arguments), tuple(w.draw(INSTANCES)), has_rotary)
