"""Gated MLPs: gate and up projections of one input, in every order and spelling, or halves of one packed projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tf_tools.fuzz._program import Program
from tf_tools.fuzz._text import INSTANCES, class_text
from tf_tools.fuzz._writer import Writer

INNER = 12


def start(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[Writer, str]:
    """A writer for a forward of one input, and the text of its arguments behind the receiver."""
    x = draw(st.sampled_from(("x", "hidden_states", "größe")))
    receiver = draw(st.sampled_from(("self", "self", "self", "self", "self", "self", "this")))
    writer = Writer(draw, x=x, receiver=receiver, calm=draw(st.integers(0, 9)) < 4)
    form = writer.pick(
        "{x}", "{x}", "{x}", "{x}, scale=1.0", "{x}, *others", "{x}, **options", "{x}, /", "{x}: torch.Tensor"
    )
    return writer, form.format(x=x)


@st.composite
def mlps(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Program:
    """Modules with two projections."""
    w, arguments = start(draw)
    gate, up, down = w.pick(("gate_proj", "up_proj", "down_proj"), ("up_proj", "gate_proj", "w2"), ("w1", "w3", "w2"))
    given = w.x
    _before(w)
    g, a, u = "", "", ""
    order = w.pick("gate up act", "gate act up", "up gate act")
    for step in order.split():
        if step == "gate":
            g = w.bind(w.layer(gate, w.source()), "gate")
        elif step == "up":
            u = w.bind(_around(w, w.layer(up, w.source())), "up")
        else:
            a = w.bind(activated(w, g), "activated")
        w.gap()
    product = w.bind(multiplied(w, a, u), "product")
    w.gap()
    if not w.is_calm and w.rarely(8):
        other = w.bind(f"{activated(w, f'{w.me}.gate_too({w.x})')} * {w.me}.up_too({w.x})", "other")
        product = w.bind(
            w.pick(f"{product} + {other}", f"{product} * {other}", f"torch.cat(({product}, {other}), 1)"), "both"
        )
    _after(w, product, down, given)
    changed = (
        f"self.{up} = self.{gate} if plain else self.{up}",
        f"self.{up} = nn.Linear(8, {INNER}, bias=bias, dtype=torch.float64) if plain else self.{up}",
    )
    init = f"""
        self.gate_too, self.up_too = nn.Linear(8, {INNER}, bias=bias), nn.Linear(8, {INNER}, bias=bias)
        self.{gate} = nn.Linear(8, {INNER}, bias=bias)
        self.{up} = nn.Linear(8, {INNER}, bias=bias or (other_bias and wide))
        self.{down} = nn.Linear({INNER}, 8, bias=other_bias)
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.1)
        {activation_text(w)}
        {w.pick("", "", "", "", "", *changed)}
    """
    return Program("mlp", class_text(w.body(), init, w, arguments=arguments), tuple(w.draw(INSTANCES)))


@st.composite
def packed_mlps(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Program:
    """Modules with gate and up in one projection."""
    w, arguments = start(draw)
    packed, down = w.pick(("gate_up_proj", "down_proj"), ("fc1", "fc2"))
    given = w.x
    _before(w)
    both = w.bind(w.layer(packed, w.source()), "both")
    w.gap()
    first, second = halves(w, both)
    w.gap()
    gate, up = w.pick((first, second), (second, first))
    a = w.bind(activated(w, gate), "activated")
    w.gap()
    product = w.bind(multiplied(w, a, _around(w, up)), "product")
    w.gap()
    _after(w, product, down, given)
    kind = w.pick("nn.Linear(8, {n}, bias=bias)", "nn.Linear(8, {n}, bias=bias)", "Conv1D({n}, 8)")
    width = 3 * INNER if not w.is_calm and w.rarely(16) else 2 * INNER
    init = f"""
        from transformers.pytorch_utils import Conv1D
        self.{packed} = {kind.format(n=width)}
        self.{down} = nn.Linear({INNER}, 8, bias=other_bias)
        self.norm, self.dropout, self.inner = nn.LayerNorm(8), nn.Dropout(0.1), {INNER}
        {activation_text(w)}
    """
    return Program("packed_mlp", class_text(w.body(), init, w, arguments=arguments), tuple(w.draw(INSTANCES)))


def halves(w: Writer, both: str) -> tuple[str, str]:
    """The two halves of a value, under names or as expressions."""
    me, n = w.me, INNER
    whole = w.pick(
        f"{both}.chunk(2, dim=-1)",
        f"torch.chunk({both}, 2, -1)",
        f"{both}.split({n}, dim=-1)",
        f"{both}.split([{n}, {n}], -1)",
        f"torch.split({both}, {me}.inner, dim=-1)",
        f"{both}.split({both}.shape[-1] // 2, dim=-1)",
        f"torch.tensor_split({both}, 2, dim=-1)",
        f"th.chunk({both}, 2, dim=-1)",
        f"torch.Tensor.chunk({both}, 2, -1)",
        f"{both}.chunk((count := 2), dim=-1)",
        f"{both}.chunk(2, dim=2)",
        "slices",
        "slices",
    )
    if not w.is_calm and w.rarely(8):
        whole = w.pick(
            f"{both}.unflatten(-1, (2, {n})).unbind(-2)",
            f"{both}.unflatten(-1, ({n}, 2)).unbind(-1)",
            f"{both}.view(*{both}.shape[:-1], 2, {n}).unbind(2)",
            f"({both} * 1.5).chunk(2, dim=-1)",
            f"reversed({both}.chunk(2, dim=-1))",
            f"{both}.chunk(2, dim=-1)[::-1]",
            f"[half + 0.0 for half in {both}.chunk(2, dim=-1)]",
            f"({both}[..., :{n}], {both}[..., :{n}])",
            f"{both}.split([{n} // 2, {n}, {n} // 2], -1)[:2]",
        )
    if whole == "slices":
        name = both if both.isidentifier() else "packed"
        if name != both:
            w.put(f"{name} = {both}")
        cut = w.pick(
            (f"[..., :{n}]", f"[..., {n}:]"),
            (f"[:, :, :{n}]", f"[:, :, {n}:]"),
            (f"[..., :{name}.shape[-1] // 2]", f"[..., {name}.shape[-1] // 2:]"),
            (f"[..., :{me}.inner]", f"[..., -{me}.inner:]"),
        )
        if not w.is_calm and w.rarely(8):
            cut = w.pick(
                ("[..., ::2]", "[..., 1::2]"),
                (f"[..., 1:{n + 1}]", f"[..., {n}:]"),
                (f"[..., :{n}]", f"[..., :{n}]"),
                (f"[..., 0:{n}:1]", f"[..., {n}:None]"),
                (f"[:, -1:, :{n}]", f"[:, -1:, {n}:]"),
                (f"[..., :{n}]", f"[..., range({n}, {2 * n})]"),
            )
        return w.bind(f"{name}{cut[0]}", "first"), w.bind(f"{name}{cut[1]}", "second")
    form = w.pick("two", "two", "two", "index", "star")
    if form == "two":
        first, second = w.name("first"), w.name("second")
        w.put(f"{first}, {second} = {whole}")
    elif form == "star":
        first, second = w.name("first"), "second"
        w.put(f"{first}, *rest = {whole}\n{second} = rest[0]")
    else:
        w.put(f"parts = {whole}")
        return w.bind("parts[0]", "first"), w.bind("parts[1]", "second")
    w.scope += [first, second]
    return first, second


def activated(w: Writer, g: str) -> str:
    """The gate after its activation."""
    me = w.me
    if not w.is_calm and w.rarely(8):
        return w.pick(
            f"F.relu({g})",
            f"torch.sigmoid({g})",
            f"F.silu({g}).clamp(max=2.0)",
            f"F.silu({g}.clamp(max=2.0))",
            f"F.silu({g}, inplace=True)",
            f"F.silu({g}.float()).to({w.x}.dtype)",
            f"F.softmax({g}, dim=-1)",
            f"F.silu({g} * 1.5)",
            f"{g} * torch.sigmoid({g})",
            f"F.glu(torch.cat(({g}, {g}), -1))",
            f"{me}.act({me}.act({g}))",
            f"({me}.act({g}) if {me}.flag else F.relu({g}))",
            f"F.silu({g}[..., :])",
            f"F.gelu({g}, approximate={me}.form)",
        )
    return w.pick(
        f"{me}.act({g})", f"F.silu({g})", f"F.gelu({g}, approximate='tanh')", f"F.gelu({g})", f"{me}.function({g})"
    )


def multiplied(w: Writer, a: str, u: str) -> str:
    """The product of activated gate and up."""
    if a.isidentifier() and w.rarely(6):
        w.put(w.pick(f"{a} *= {u}", f"{a}.mul_({u})"))
        return a
    if not w.is_calm and w.rarely(8):
        return w.pick(
            f"{a} * ({u} + 1.0)",
            f"{a} * {u} * {w.me}.times",
            f"{a} * {u} * {u}",
            f"{a} + {u}",
            f"{a} * {u}.clamp(-1.0, 1.0)",
            f"({a} * {u}).to({w.x}.dtype)",
            f"{a} * {u}.float()",
            f"torch.mul({a}, {u}, out={u})",
            f"{a}.mul({u}) + {a}",
            f"torch.einsum('bti,bti->bti', {a}, {u})",
            f"{a} / {u}",
            f"{a} * {u}[..., :]",
        )
    return w.pick(f"{a} * {u}", f"{u} * {a}", f"torch.mul({a}, {u})", f"{u}.mul({a})")


def activation_text(w: Writer) -> str:
    """Statements of ``__init__`` that make `act`, `function` and `form`."""
    act = w.pick("nn.SiLU()", "nn.GELU(approximate='tanh')", "nn.GELU()", "nn.SiLU() if flag else nn.GELU()")
    if not w.is_calm and w.rarely(6):
        act = w.pick(
            "nn.SiLU() if flag else nn.ReLU()", "nn.ReLU()", "nn.SiLU(inplace=True)", "nn.Sequential(nn.SiLU())"
        )
    return f"self.act, self.function, self.form = {act}, F.silu if times == 1 else F.gelu, 'tanh' if flag else 'none'"


def _before(w: Writer) -> None:
    if w.rarely(6):
        w.put(w.pick(f"residual = {w.x}", f"{w.x} = {w.me}.norm({w.x})", f"given = {w.x}", f"{w.x} = {w.x} * 1.5"))
        w.scope += [name for name in ("residual", "given") if w.statements[-1].startswith(name)]
    w.gap()


def _around(w: Writer, up: str) -> str:
    return f"{up} * 1.0" if not w.is_calm and w.rarely(20) else up


def _after(w: Writer, product: str, down: str, given: str) -> None:
    out = f"{w.me}.{down}({product})"
    if w.rarely(5):
        name = w.name("out")
        w.put(f"{name} = {out}")
        w.gap()
        out = name
    out = w.pick(out, out, out, f"{w.me}.dropout({out})", f"{out} + {given}")
    w.put(f"return {w.result(out)}")
