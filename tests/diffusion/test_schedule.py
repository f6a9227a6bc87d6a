"""Schedules and steps are those of diffusers' schedulers."""

import pytest
import torch
from oracle import require

from tilewright.diffusion.schedule import Schedule, estimate, euler, flow_match_schedule, linear_sigmas, shift_for
from tilewright.types import UnsupportedConfig

CONFIGS = [
    {},
    {"shift": 3.0},
    {"use_dynamic_shifting": True},
    {"use_dynamic_shifting": True, "time_shift_type": "linear"},
    {"use_dynamic_shifting": True, "shift_terminal": 0.02},
    {"shift": 5.0, "use_karras_sigmas": True},
    {"shift": 2.0, "use_exponential_sigmas": True},
]


def scheduler(config):
    return require("diffusers").FlowMatchEulerDiscreteScheduler(**config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("num_steps", [2, 4, 9])
@pytest.mark.parametrize("own_sigmas", [False, True])
def test_sigmas(config, num_steps, own_sigmas):
    reference = scheduler(config)
    sigmas = linear_sigmas(num_steps) if own_sigmas else None
    mu = shift_for(1000, config) if config.get("use_dynamic_shifting") else None
    reference.set_timesteps(num_steps, sigmas=sigmas, mu=mu)
    schedule = flow_match_schedule(config, num_steps, sigmas=sigmas, mu=mu)
    torch.testing.assert_close(torch.tensor(schedule.sigmas), reference.sigmas.float(), atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.tensor(schedule.timesteps), reference.timesteps.float(), atol=1e-3, rtol=0)


def test_euler_steps():
    reference = scheduler({"shift": 3.0})
    reference.set_timesteps(4)
    schedule = flow_match_schedule({"shift": 3.0}, 4)
    step, latents = euler(schedule), torch.randn(2, 3, 4)
    expected = latents.clone()
    for i, timestep in enumerate(reference.timesteps):
        velocity = torch.randn(2, 3, 4)
        expected = reference.step(velocity, timestep, expected, return_dict=False)[0]
        seen = estimate(schedule, i, latents, velocity)
        latents = step(i, latents, velocity)
        torch.testing.assert_close(latents, expected)
    torch.testing.assert_close(seen, latents)  # the last step sees the image itself


def test_the_shift_by_resolution():
    config = {"base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256, "max_image_seq_len": 8192}
    assert shift_for(256, config) == 0.5 and shift_for(8192, config) == pytest.approx(0.9)
    assert shift_for(4096, {}) == pytest.approx(1.15)


def test_one_step_of_a_stretched_schedule_is_a_number():
    """diffusers divides by zero here: one sigma, at 1, cannot end elsewhere."""
    schedule = flow_match_schedule({"shift_terminal": 0.02}, 1, sigmas=[1.0])
    assert schedule == Schedule((1.0, 0.0))


@pytest.mark.parametrize("name", ["use_beta_sigmas", "stochastic_sampling", "invert_sigmas"])
def test_what_is_not_built_is_named(name):
    with pytest.raises(UnsupportedConfig, match=name):
        flow_match_schedule({name: True}, 4)
    with pytest.raises(UnsupportedConfig, match="time_shift_type is 'cubic'"):
        flow_match_schedule({"use_dynamic_shifting": True, "time_shift_type": "cubic"}, 4, mu=1.0)
