import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from asyncrl_jax.config import MeshConfig, ModelConfig
from asyncrl_jax.models.mesh import AXES, make_mesh
from asyncrl_jax.models.sharding import param_shardings
from asyncrl_jax.models.transformer import abstract_params


def abstract_mesh(data=1, fsdp=1, expert=1, tensor=1):
    return AbstractMesh((data, fsdp, expert, tensor), AXES, axis_types=(AxisType.Auto,) * 4)


def test_every_leaf_has_a_place_and_experts_lie_on_the_expert_axis():
    shardings = param_shardings(ModelConfig(), abstract_mesh(fsdp=2, expert=4, tensor=2))
    assert shardings.keys() == abstract_params(ModelConfig()).keys()
    assert tuple(shardings["layers.1.moe.gate_proj"].spec) == ("expert", "fsdp", "tensor")
    assert shardings["layers.1.moe.gate_proj"].shard_shape((8, 64, 64)) == (2, 32, 32)


def test_an_axis_that_does_not_divide_names_the_leaf():
    with pytest.raises(ValueError, match=r"tensor = 4 does not divide kv_heads = 2 of 'layers\.0\.attention\.k_proj'"):
        param_shardings(ModelConfig(), abstract_mesh(tensor=4))


def test_a_mesh_has_all_axes_on_one_device_and_needs_enough_of_them():
    assert dict(make_mesh(MeshConfig()).shape) == dict.fromkeys(AXES, 1)
    with pytest.raises(ValueError, match=r"needs \d+ devices"):
        make_mesh(MeshConfig(expert=2 * len(jax.devices())))
