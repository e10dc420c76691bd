"""Root-mean-square norms in every spelling, and norms that are none, alone or inside of a block that projects."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tf_tools.fuzz._program import HIDDEN, Program
from tf_tools.fuzz._text import HEADER, INSTANCES, class_text
from tf_tools.fuzz._writer import Writer

Draw = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def norms(draw: Draw) -> Program:
    """A norm as the block itself."""
    w = Writer(draw, x=draw(st.sampled_from(("x", "hidden_states"))), receiver="self", calm=draw(st.integers(0, 9)) < 6)
    arguments, forward, init = _norm(w)
    w.methods = {}
    text = class_text(forward, init, w, arguments=arguments)
    return Program("norm", text, tuple(w.draw(INSTANCES)), input_name=w.x, is_keyword=w.rarely(12))


@st.composite
def normed_pairs(draw: Draw) -> Program:
    """A norm between two linears, over their features or over each head, so that it may be split over ranks."""
    w = Writer(draw, x="x", receiver="self", calm=draw(st.integers(0, 9)) < 6)
    arguments, forward, init = _norm(w, width_name="width")
    norm = (
        "class Norm(nn.Module):\n    def __init__(self, width, flag=True, times=1, bias=False, plain=False):\n"
        "        super().__init__()\n        self.flag, self.times, self.seen = flag, times, []\n"
        f"{textwrap.indent(init, '        ')}\n\n"
        f"    def forward(self, {arguments}):\n{textwrap.indent(forward, '        ')}\n"
    )
    over = w.pick("features", "heads", "input")
    outer = Writer(draw, x="x", receiver="self", calm=True)
    body = {
        "features": "return self.down(self.norm(self.up(x)))",
        "heads": "heads = self.norm(self.up(x).view(*x.shape[:-1], -1, 4))\nreturn self.down(heads.flatten(2))",
        "input": "h = self.norm(x)\nreturn self.down(torch.tanh(self.up(h)))",
    }[over]
    width = {"features": 16, "heads": 4, "input": HIDDEN}[over]
    made = f"""
        self.up = nn.Linear({HIDDEN}, 16, bias=bias)
        self.down = nn.Linear(16, {HIDDEN}, bias=other_bias)
        self.norm = Norm({width}, flag, times, bias, plain)
    """
    text = class_text(body, made, outer, arguments="x").replace("\nclass Block", f"\n{norm}\n\nclass Block", 1)
    assert HEADER in text
    return Program("normed_pair", text, tuple(w.draw(INSTANCES)))


def _norm(w: Writer, width_name: str = "8") -> tuple[str, str, str]:
    """Arguments, body and ``__init__`` of a norm."""
    x, me = w.x, w.me
    odd = not w.is_calm
    init = [f"self.eps, self.n = {w.pick('0.1', '0.05', '1e-6', '0.5 if flag else 0.1')}, {width_name}"]
    has_weight = w.pick(True, True, True, False)
    if has_weight:
        init.append(f"self.weight = nn.Parameter(torch.ones({width_name}))")
    if odd and w.rarely(6):
        init.append(
            w.pick(
                f"self.bias = nn.Parameter(torch.zeros({width_name}))",
                "self.register_buffer('count', torch.ones(1))",
                f"self.scale = nn.Parameter(torch.ones({width_name}))",
                "self.shift = nn.Parameter(torch.ones(1))",
            )
        )
    if w.pick(True, False):
        w.put(f"dtype = {x}.dtype")
        kept = "dtype"
    else:
        kept = f"{x}.dtype" if not odd or w.pick(True, False) else "torch.float32"
    wide = w.bind(w.pick(x, x, f"{x}.float()", f"{x}.to(torch.float32)", f"{x}.type(torch.float64)"), "wide")
    _odd(w, wide)
    squared = w.pick(
        f"{wide}.pow(2)", f"{wide} ** 2", f"{wide} * {wide}", f"torch.square({wide})", f"torch.pow({wide}, 2)"
    )
    if odd and w.rarely(12):
        squared = w.pick(
            f"{wide}.abs()",
            f"{wide}.pow(4)",
            f"({wide} - {wide}.mean(-1, keepdim=True)) ** 2",
            f"{wide} * {x} * 1.01",
            f"{wide}.pow(2.0)",
            f"{wide}.float().pow(2)",
        )
    mean = w.pick(
        f"({squared}).mean(-1, keepdim=True)",
        f"torch.mean({squared}, dim=-1, keepdim=True)",
        f"({squared}).mean(dim=-1, keepdim=True)",
        f"({squared}).mean(dim=[-1], keepdim=True)",
        f"({squared}).mean(-1, True)",
    )
    if odd and w.rarely(8):
        mean = w.pick(
            f"({squared}).sum(-1, keepdim=True)",
            f"({squared}).sum(-1, keepdim=True) / {me}.n",
            f"({squared}).mean(1, keepdim=True)",
            f"({squared}).mean(-1).unsqueeze(-1)",
            f"({squared}).mean((-1, -2), keepdim=True)",
            f"({squared}).mean(2, keepdim=True)",
            f"{wide}.var(-1, keepdim=True)",
            f"({squared})[..., :4].mean(-1, keepdim=True)",
            f"({squared}).median(-1, keepdim=True).values",
        )
    variance = w.bind(mean, "variance")
    _odd(w, variance)
    eps = w.pick(f"{me}.eps", f"{me}.eps", "0.1", "1e-5", f"torch.tensor({me}.eps)" if odd else f"{me}.eps")
    summed = w.pick(
        f"{variance} + {eps}", f"{eps} + {variance}", f"torch.add({variance}, {eps})", f"({variance}).add({eps})"
    )
    if odd and w.rarely(8):
        summed = w.pick(
            f"{variance}",
            f"{variance}.clamp(min={eps})",
            f"{variance} + {eps} * 2",
            f"{variance} - {eps} * 0.1",
            f"{variance} + {eps} + {eps}",
            f"torch.add({variance}, 1.0, alpha={eps})",
            f"{variance} + {me}.eps ** 2",
        )
    summed = f"({summed})"
    form = w.pick("rsqrt", "rsqrt", "rsqrt", "power", "sqrt", "method", "one over", "torch")
    if form == "torch":
        shape = w.pick(f"({me}.n,)", f"({wide}.shape[-1],)", f"{me}.weight.shape" if has_weight else f"[{me}.n]")
        weight = ", " + w.pick(f"{me}.weight", f"weight={me}.weight") if has_weight and w.pick(True, False) else ""
        normed = f"F.rms_norm({wide}, {shape}{weight}, eps={eps})"
        has_weight = has_weight and not weight
    else:
        root = {
            "rsqrt": f"torch.rsqrt({summed})",
            "method": f"{summed}.rsqrt()",
            "power": w.pick(f"{summed} ** -0.5", f"{summed}.pow(-0.5)", f"torch.pow({summed}, -0.5)"),
            "one over": w.pick(
                f"(1 / torch.sqrt({summed}))", f"(1.0 / {summed}.sqrt())", f"{summed}.sqrt().reciprocal()"
            ),
            "sqrt": "",
        }[form]
        if odd and form != "sqrt" and w.rarely(16):
            root = w.pick(
                f"(torch.rsqrt({variance}) + {eps})",
                f"(1 / (torch.sqrt({variance}) + {eps}))",
                f"{summed} ** -1",
                f"{summed} ** 0.5",
            )
        root = w.bind(root, "scale") if root and w.rarely(3) else root
        base = x if w.rarely(6) else wide
        normed = (
            f"({base} / torch.sqrt({summed}))"
            if form == "sqrt"
            else w.pick(f"{base} * {root}", f"{root} * {base}", f"torch.mul({base}, {root})")
        )
    normed = w.bind(normed, "normed")
    _odd(w, normed)
    normed = f"({normed})" if not normed.isidentifier() else normed
    if w.pick(True, False):
        normed = w.bind(w.pick(f"{normed}.to({kept})", f"{normed}.type_as({x})", f"{normed}.to({x})"), "cast")
    if odd and w.rarely(10):
        normed = w.pick(
            f"{normed}.to(torch.bfloat16)",
            f"({normed}).half().float()",
            f"({normed} * 1.5)",
            f"torch.tanh({normed})",
            f"({normed} + {x})",
        )
    if has_weight:
        weight = w.pick(
            f"{me}.weight",
            f"{me}.weight",
            f"(1.0 + {me}.weight)",
            f"({me}.weight + 1)",
            f"{me}.weight.float()",
            f"(1.0 + {me}.weight.float())",
        )
        if odd and w.rarely(6):
            weight = w.pick(
                f"(0.5 + {me}.weight)",
                f"(2.0 * {me}.weight)",
                f"torch.exp({me}.weight)",
                f"(1.0 - {me}.weight)",
                f"{me}.weight[None]",
                f"({me}.weight - 1.0)",
                f"{me}.weight.flip(0)",
                f"{me}.weight.detach()",
                f"({me}.weight + {me}.eps)",
                f"{me}.weight.view(1, 1, -1)",
                f"torch.add({me}.weight, 1, alpha=2)",
                f"({me}.weight if {me}.flag else 1.0 + {me}.weight)",
            )
        result = w.pick(f"{normed} * {weight}", f"{weight} * {normed}", f"torch.mul({normed}, {weight})")
    else:
        result = normed
    result = w.bind(result, "result")
    _odd(w, result)
    result = w.pick(result, result, f"({result}).to({kept})", f"({result}).type_as({x})")
    if odd and w.rarely(8):
        result = w.pick(
            f"({result}) + {me}.eps",
            f"{result}, None",
            f"{x} + ({result})",
            f"({result})[..., :]",
            f"({result}).contiguous()",
            f"F.dropout({result}, 0.0)",
            f"({result}) * {me}.times",
            f"({result} if {me}.flag else {x})",
        )
    w.put(f"return {w.result(result)}")
    arguments = w.pick(x, x, x, x, x, f"{x}, residual=None", f"{x}, /", f"{x}, *others") if odd else x
    return arguments, w.body(), "\n".join(init)


def _odd(w: Writer, value: str) -> None:
    if not w.is_calm and value.isidentifier():
        w.gap()
