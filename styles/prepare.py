"""Styles that cut no parameter and only say what goes into and out of a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from dtensor.placement import Placement, Shard
from dtensor.styles.style import Layout, ParallelStyle, Port

PlacementRow = Placement | Sequence[Placement | None] | None


class PrepareModuleInput(ParallelStyle):
    """Bring the inputs of a module from one placement to another.

    A plain input is this rank's part of a tensor placed as ``input_layouts`` says; a
    DTensor knows its placements. Both are brought to ``desired_input_layouts``. Inputs
    whose entry is None are left alone. An input that is a tuple, list or dict has one
    placement for all tensors in it; None in the place of a tensor is passed on.

    Args:
        input_layouts: One placement (or None) per positional input; one alone stands
            for a single input.
        desired_input_layouts: As many placements; where one is None, its input stays as
            it is given.
        input_kwarg_layouts: Placements of inputs by name. A name that a call leaves out
            is passed over; one given by position is found by the signature.
        desired_input_kwarg_layouts: The placements those are brought to.
        use_local_output: Hand plain local tensors to the module, not DTensors.
        mesh_dim: The mesh axis; see ``ParallelStyle``.

    Raises:
        ValueError: Layouts that do not match in number or name, or none at all.
    """

    def __init__(
        self,
        *,
        input_layouts: PlacementRow = None,
        desired_input_layouts: PlacementRow = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
        mesh_dim: str | int | None = None,
    ) -> None:
        super().__init__(mesh_dim=mesh_dim)
        self.input_layouts = self._placements("input_layouts", input_layouts)
        self.desired_input_layouts = self._placements(
            "desired_input_layouts", desired_input_layouts
        )
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        given, wanted = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        if given.keys() != wanted.keys():
            raise ValueError(
                f"{type(self).__name__}: input_kwarg_layouts and "
                f"desired_input_kwarg_layouts name different inputs, got "
                f"{sorted(given)} and {sorted(wanted)}, expected the same. Give each "
                f"keyword input both."
            )
        if self.input_layouts is None and not given:
            raise ValueError(
                f"{type(self).__name__}: there is nothing to bring anywhere, got no "
                f"input_layouts and no input_kwarg_layouts, expected one of them. Write "
                f"for example input_layouts=(Shard(1),), "
                f"desired_input_layouts=(Replicate(),)."
            )
        self._ports = self._paired(
            ("input_layouts", self.input_layouts),
            ("desired_input_layouts", self.desired_input_layouts),
            use_local_output,
        )
        self._keywords: dict[str, Port | None] = {}
        for name in given:
            row = f"input_kwarg_layouts[{name!r}]"
            other = f"desired_{row}"
            ports = self._paired(
                (row, self._placements(row, (given[name],))),
                (other, self._placements(other, (wanted[name],))),
                use_local_output,
            )
            self._keywords[name] = ports[0] if ports else None

    def layout(self, module: nn.Module) -> Layout:
        """Ports of the inputs."""
        keywords = {
            name: port for name, port in self._keywords.items() if port is not None
        }
        # What the module computes with plain parts of a tensor, it computes in parts.
        ports = [*(self._ports or ()), *keywords.values()]
        parts = [
            p.wanted for p in ports if p and p.local and isinstance(p.wanted, Shard)
        ]
        return Layout(
            inputs=self._ports,
            keywords=keywords,
            around=parts[0] if parts else None,
        )


class PrepareModuleOutput(ParallelStyle):
    """Bring the outputs of a module from one placement to another.

    Args:
        output_layouts: One placement (or None) per output; one alone stands for a
            single output. A plain output is this rank's part of a tensor placed so.
        desired_output_layouts: As many placements they are brought to; an output whose
            ``output_layouts`` is None is left alone.
        use_local_output: Give plain local tensors rather than DTensors.
        mesh_dim: The mesh axis; see ``ParallelStyle``.

    Raises:
        ValueError: Layouts that do not match in number.
    """

    def __init__(
        self,
        *,
        output_layouts: PlacementRow,
        desired_output_layouts: PlacementRow,
        use_local_output: bool = True,
        mesh_dim: str | int | None = None,
    ) -> None:
        super().__init__(mesh_dim=mesh_dim)
        self.output_layouts = self._placements("output_layouts", output_layouts)
        self.desired_output_layouts = self._placements(
            "desired_output_layouts", desired_output_layouts
        )
        self.use_local_output = use_local_output
        self._ports = self._paired(
            ("output_layouts", self.output_layouts),
            ("desired_output_layouts", self.desired_output_layouts),
            use_local_output,
        )

    def layout(self, module: nn.Module) -> Layout:
        """Ports of the outputs."""
        return Layout(outputs=self._ports)


class PrepareModuleInputOutput(ParallelStyle):
    """``PrepareModuleInput`` and ``PrepareModuleOutput`` on one module.

    Args:
        input_layouts: As in ``PrepareModuleInput``, with the next three.
        desired_input_layouts: See there.
        input_kwarg_layouts: See there.
        desired_input_kwarg_layouts: See there.
        use_local_input: Hand plain local tensors to the module.
        output_layouts: As in ``PrepareModuleOutput``, with the next two.
        desired_output_layouts: See there.
        use_local_output: See there.
        mesh_dim: The mesh axis; see ``ParallelStyle``.
    """

    def __init__(
        self,
        *,
        input_layouts: PlacementRow = None,
        desired_input_layouts: PlacementRow = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: PlacementRow,
        desired_output_layouts: PlacementRow,
        use_local_output: bool = True,
        mesh_dim: str | int | None = None,
    ) -> None:
        super().__init__(mesh_dim=mesh_dim)
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def layout(self, module: nn.Module) -> Layout:
        """Ports of both."""
        entry = self.prepare_module_input.layout(module)
        return Layout(
            inputs=entry.inputs,
            keywords=entry.keywords,
            outputs=self.prepare_module_output.layout(module).outputs,
            around=entry.around,
        )
