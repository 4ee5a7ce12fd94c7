"""What the drawing commands of all systems need to know of a system."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import flags

from diffusion_jax.draw.model import Model
from diffusion_jax.draw.options import Options

flags.disclaim_key_flags()  # --help lists these flags with those of the module that runs a command.


class Kind(NamedTuple):
    """A system whose models draw: how to open its models, and what users may choose."""

    package: str
    """The package that holds the commands, such as "sd_jax"."""
    options: Options
    """The drawing options that users may set by flags, keyed by name."""
    guidance: Sequence[float]
    """The default guidance scales of an evaluation."""
    open: Callable[..., Model]
    """A function (paths of the stages, option values of each stage) -> the loaded model. It raises
    ValueError or OSError if it cannot open the model."""
    file_options: Options | None = None
    """The options of models that were trained elsewhere. None: the system opens only runs, which
    may form a cascade."""

    def define_paths(self, *, several: bool) -> Callable[[], tuple[list[str], list[str]]]:
        """Define --workdir and, if the system opens models trained elsewhere, --model.

        Return a function that returns the values of both flags. With `several`, each flag may be
        repeated. In a system with cascades, --workdir may always be repeated, once per stage.
        """
        if self.file_options is None:
            stages = flags.DEFINE_multi_string(
                "workdir", None, "The workdir of a training run; repeat it for a cascade.", required=True
            )
            return lambda: (stages.value, [])
        define: Callable[..., flags.FlagHolder] = flags.DEFINE_string
        default, more = None, "."
        if several:
            define, default, more = flags.DEFINE_multi_string, [], "; may be repeated."
        workdir = define("workdir", default, f"The workdir of a training run{more}")
        model = define("model", default, f"A diffusers directory or a checkpoint file{more}")
        of = lambda value: value if several else [value] if value else []
        return lambda: (of(workdir.value), of(model.value))
