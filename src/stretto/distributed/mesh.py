"""A device mesh: which of its dimensions share out the samples, and which the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from stretto.errors import TrainingError
from stretto.runtime.ranks import Ranks
from stretto.settings import DATA_DIMENSIONS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@final
class Mesh:
    """A `DeviceMesh` over all ranks; its data-parallel dimensions share out the samples.

    Ranks that differ only in the other dimensions form a model group: they have the same samples
    and share one model. With context parallelism, too, samples belong to data ranks; torch cuts
    the sequence, so a logged loss is that of the first part.

    Args:
        mesh: the mesh, with names of its dimensions.
        data: the names of the data-parallel dimensions; None: those in `DATA_DIMENSIONS`.

    Raises:
        TrainingError: it has no such dimension, or does not have all ranks.
    """

    def __init__(self, mesh: DeviceMesh, data: Sequence[str] | None = None) -> None:
        names = mesh.mesh_dim_names or ()
        ours = [name for name in names if name in DATA_DIMENSIONS] if data is None else list(data)
        if not set(ours) <= set(names) or (data is None and not ours):
            raise TrainingError.cannot(
                f"share out samples over a mesh of {shape_text(mesh)}",
                why=f"it has no data-parallel dimension {', '.join(ours or DATA_DIMENSIONS)}",
                instead="name one 'dp', or write Mesh(mesh, data=('name',)), () if all ranks have "
                "the same samples",
            )
        world_size = Ranks().world_size
        place = mesh.get_coordinate()
        if place is None or mesh.size() != world_size:
            raise TrainingError.cannot(
                f"train on a mesh of {shape_text(mesh)}",
                why=f"the run has {world_size} ranks",
                instead="make a mesh of all ranks with init_device_mesh",
            )
        self.mesh = mesh
        self.data = tuple(name for name in names if name in ours)
        """The data-parallel dimensions, in the order of the mesh."""
        axes = [names.index(name) for name in self.data]
        self.dp_rank = 0
        """The number of this rank's model group."""
        for axis in axes:
            self.dp_rank = self.dp_rank * mesh.size(axis) + place[axis]
        self.dp_world_size = math.prod(mesh.size(axis) for axis in axes)
        """The number of model groups."""
        self.is_loss_rank = not any(at for axis, at in enumerate(place) if axis not in axes)
        """Whether this is the first rank of its model group."""
        own = tuple(slice(None) if axis in axes else at for axis, at in enumerate(place))
        self.peers: frozenset[int] = frozenset(mesh.mesh[own].flatten().tolist())
        """The ranks with the same part of the model, over which gradients are averaged."""

    def tell(self, ranks: Ranks) -> None:
        """Tell the processes of a run which of them have the same samples."""
        ranks.share_samples(self.dp_rank, self.dp_world_size, is_loss_rank=self.is_loss_rank)

    def has_order_of(self, mesh: DeviceMesh) -> bool:
        """Return whether the dimensions of `mesh` come in the same order as in this one."""
        names, others = self.mesh.mesh_dim_names or (), mesh.mesh_dim_names or ()
        places = [names.index(name) for name in others if name in names]
        return places == sorted(places)

    def __repr__(self) -> str:
        """Return the sizes and the data-parallel dimensions."""
        return f"Mesh({shape_text(self.mesh)}, data={self.data})"


def shape_text(mesh: DeviceMesh) -> str:
    """Return the sizes of a mesh by name."""
    names = mesh.mesh_dim_names or ["?"] * mesh.ndim
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


def as_mesh(mesh: DeviceMesh | Mesh | None) -> Mesh | None:
    """Return a mesh as a `Mesh`.

    Raises:
        TrainingError: it is of another kind, or has other ranks than the run.
    """
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    if not hasattr(mesh, "mesh_dim_names"):
        instead = "pass init_device_mesh('cuda', (2, 4), mesh_dim_names=('dp', 'tp')), or in a run "
        instead += "file write mesh: {dp: 2, tp: 4}"
        raise TrainingError.bad("mesh", mesh, "it is not a DeviceMesh", instead)
    return Mesh(mesh)
