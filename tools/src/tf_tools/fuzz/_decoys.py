"""Statements that stand between the parts of a block, and may or may not change what it computes.

In: a writer, the name of a tensor. Out: one statement more, and helpers that it calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tf_tools.fuzz._writer import Writer


def disturb(w: Writer, t: str) -> None:
    """Put one statement that may matter to the tensor `t`, or to what is computed from it later."""
    me, x = w.me, w.x
    kind = w.pick("use", "alias", "rebind", "write", "flow", "layer", "state")
    if kind == "use":
        name = f"extra_{len(w.extras)}"
        w.extras.append(name)
        form = w.pick("{t}.mean()", "_scaled({t}).mean()", "float({t}.shape[1])", "[{t}]", "(lambda: {t})")
        w.put(f"{name} = {form.format(t=t)}")
        w.extras[-1] = f"{name}[0].mean()" if form == "[{t}]" else f"{name}().mean()" if "lambda" in form else name
    elif kind == "alias":
        name = w.pick("alias", "given", t)
        same = "{t}", "{t}.view({t}.shape)", "{t}[..., :]", "{t}.detach()", "{t}.clone()", "{t}.contiguous()"
        w.put(f"{name} = {w.pick(*same).format(t=t)}")
        w.scope.append(name)
    elif kind == "rebind":
        rebound = (
            "{t} = {t} * 1.5",
            "{t} = _scaled({t})",
            "{t} = F.dropout({t}, 0.0)",
            "{t} = _for_size({t})",
            "{t} = torch.tanh({t})",
        )
        w.put(w.pick(*rebound).format(t=t))
    elif kind == "write":
        w.methods["bump"] = "def bump(self, given):\n    given += 0.5"
        w.put(
            w.pick(
                f"{t} += 0.5",
                f"{t}.add_(0.5)",
                f"{t}[..., 0] = 0.25",
                f"_bump({t})",
                f"torch.add({t}, 0.5, out={t})",
                f"F.relu({t}, inplace=True)",
                f"{t}.data.mul_(2.0)",
                f"{t}.data = {t} * 2.0",
                f"{t}.copy_({t} * 2.0)",
                f"{t}.zero_().add_(1.0)",
                f"{t}.view(-1)[:3].fill_(0.5)",
                f"spare = {t}.mul_(2.0)",
                f"{me}.bump({t})",
                f"_bump_one({t})",
                f"torch.Tensor.add_({t}, 0.5)",
                f"with torch.no_grad():\n    {t} += 0.5",
                f"operate = {t}.add_\noperate(0.5)",
                f"[{t}.add_(0.1) for _ in range(2)]",
            )
        )
    elif kind == "flow":
        layer = w.layers[0] if w.layers else "norm"
        w.methods["bump"] = "def bump(self, given):\n    given += 0.5"
        w.methods["decode"] = f"def decode(self, given):\n    return given + self.{layer}(given).mean()"
        w.put(
            w.pick(
                f"if {me}.flag:\n    {t} = {t} * 1.5",
                f"if {x}.shape[1] > 4:\n    {t} = {t} * 1.5",
                f"if {x}.size(0) == 1 and {me}.flag:\n    {t} = {t} + 1.0",
                f"for _ in range(2):\n    {t} = {t} * 1.5",
                f"for _ in range({me}.times):\n    {t} = {t} * 1.5",
                f"with torch.no_grad():\n    {t} = {t} * 1.5",
                f"try:\n    {t} = {t} * 1.5\nfinally:\n    spare = 2",
                f"while {me}.flag:\n    {t} = {t} * 1.5\n    break",
                f"if {me}.flag:\n    return {t}",
                f"if {x}.shape[1] == 1:\n    return {t} * 3.0",
                f"if not {me}.flag:\n    raise ValueError('flag')",
                f"{t} = {t} * 1.5 if {me}.flag else {t}",
                f"def inner():\n    nonlocal spare\n    spare = {t}\n    return {t} * 2.0\nspare = 0\n{t} = inner()",
                f"del {t}",
                f"if {x}.shape[1] == 1:\n    _bump({t})",
                f"if {x}.shape[1] == 1:\n    {me}.bump({t})",
                f"if {x}.shape[0] > 1:\n    {t}.add_(0.5)",
                f"if {x}.shape[1] < 8:\n    {t} = {t} + 0.5",
                f"{x}.shape[1] == 1 and _bump({t})",
                f"spare = _bump({t}) if {x}.shape[1] == 1 else 0",
                f"if {x}.shape[1] == 1:\n    {x} = {x} * 2.0",
                f"for at in range({x}.shape[0] - 1):\n    _bump({t})",
                f"while {x}.shape[1] == 1:\n    _bump({t})\n    break",
                f"if {x}.shape[1] == 1:\n    return {me}.decode({x})",
                f"if {x}.shape[1] == 1:\n    return getattr({me}, '{w.layers[0] if w.layers else 'norm'}')({x})",
                f"if {me}.seen:\n    {t} = {t} * 2.0\n{me}.seen.append(1.0)",
                f"if {me}.flag:\n    {t} = {t} * 2.0\n    {me}.flag = False",
                f"match {me}.times:\n    case 1:\n        {t} = {t} * 2.0",
            )
        )
    elif kind == "layer":
        layer = w.pick(*(w.layers or ["norm"]))
        name = f"extra_{len(w.extras)}"
        w.extras.append(f"{name}.mean()")
        w.put(
            w.pick(
                f"{name} = {me}.{layer}({x})",
                f"{name} = {me}.{layer}.weight",
                f"{name} = {me}.{layer}.weight * 2.0",
                f"{name} = {me}.{layer}({x}) if {x}.shape[1] > 4 else {x}",
                f"{name} = {x}\nif {me}.times > 1:\n    {name} = {me}.{layer}({x})",
                f"{name} = {x} * {me}.{layer}.out_features",
                f"{name} = {x} if {me}.{layer} is None else {x} * 2.0",
            )
        )
    else:
        w.methods["bump"] = "def bump(self, given):\n    given += 0.5"
        w.put(
            w.pick(
                f"{me}.kept = {t}",
                f"{me}.times = 2",
                f"{me}.flag = not {me}.flag",
                f"kept = []\nkept.append({t})",
                f"{me}.seen.append(1.0)",
                f"setattr({me}, 'kept', {t})",
            )
        )
