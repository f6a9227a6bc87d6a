"""UniPC and DPM-Solver++ against diffusers' schedulers, step by step."""

import math

import pytest
import torch
from oracle import require

from tilewright.diffusion.multistep import dpm_schedule, dpm_step, solver_of, unipc_schedule, unipc_step
from tilewright.types import UnsupportedConfig

SHAPE = (2, 4, 3, 5, 6)


def unipc(num_steps, shift, order=2):
    scheduler = require("diffusers").UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, solver_order=order
    )
    scheduler.set_timesteps(num_steps)
    return scheduler


def dpm(num_steps, shift):
    scheduler = require("diffusers").DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    scheduler.set_timesteps(num_steps)
    return scheduler


def velocity_of(sample, sigma):
    """A field that bends, so that steps of different orders differ."""
    return torch.sin(3 * sample) + sample * sigma - 0.3


def check_run(scheduler, schedule, step_function):
    torch.testing.assert_close(torch.tensor(schedule.sigmas), scheduler.sigmas, rtol=0, atol=0)
    assert [int(timestep) for timestep in schedule.timesteps] == scheduler.timesteps.tolist()
    ours = theirs = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    history = None
    for i, timestep in enumerate(scheduler.timesteps):
        velocity = velocity_of(theirs, schedule.sigmas[i])
        ours, history = step_function(schedule.sigmas, i, velocity_of(ours, schedule.sigmas[i]), ours, history)
        theirs = scheduler.step(velocity, timestep, theirs, return_dict=False)[0]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 20, 50])
def test_unipc_is_that_of_diffusers(num_steps, shift):
    check_run(unipc(num_steps, shift), unipc_schedule(num_steps, shift), unipc_step)


@pytest.mark.parametrize("order", [1, 3])
def test_unipc_of_other_orders_is_that_of_diffusers(order):
    def step(*args):
        return unipc_step(*args, max_order=order)

    check_run(unipc(12, 3.0, order), unipc_schedule(12, 3.0), step)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 14, 15, 30])
def test_dpm_is_that_of_diffusers(num_steps, shift):
    check_run(dpm(num_steps, shift), dpm_schedule(num_steps, shift), dpm_step)


@pytest.mark.parametrize("step_function", [unipc_step, dpm_step])
def test_both_are_of_the_second_order(step_function):
    """Where the sample is the velocity it falls as e^sigma: Euler steps would be 0.005 off after 40, a quarter of it
    after 160."""

    def error(num_steps):
        sigmas = dpm_schedule(num_steps, 1.0).sigmas
        sample, history = torch.ones(1, dtype=torch.float64), None
        for i in range(num_steps):
            sample, history = step_function(sigmas, i, sample, sample, history)
        return abs(sample.item() - math.exp(-sigmas[0]))

    assert error(40) < 2e-4
    assert error(160) < error(40) / 6


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
UNIPC = {"_class_name": "UniPCMultistepScheduler", **FLOW}
DPM = {"_class_name": "DPMSolverMultistepScheduler", **FLOW}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**UNIPC, "prediction_type": "epsilon"}, "prediction_type 'epsilon', expected 'flow_prediction'"),
        ({**UNIPC, "use_flow_sigmas": False}, "use_flow_sigmas False, expected True"),
        ({**UNIPC, "solver_type": "bh1"}, "solver_type 'bh1', expected 'bh2'"),
        ({**UNIPC, "solver_order": 4}, "solver_order 4, expected 1, 2 or 3"),
        ({**UNIPC, "use_karras_sigmas": True}, "use_karras_sigmas True, which is not supported"),
        ({**UNIPC, "disable_corrector": [0]}, r"disable_corrector \[0\], which is not supported"),
        ({**UNIPC, "final_sigmas_type": "sigma_min"}, "final_sigmas_type 'sigma_min', expected 'zero'"),
        ({**UNIPC, "lower_order_final": False}, "lower_order_final false, expected true"),
        ({**DPM, "algorithm_type": "sde-dpmsolver++"}, "algorithm_type 'sde-dpmsolver\\+\\+', expected 'dpmsolver"),
        ({**DPM, "solver_order": 3}, "solver_order 3, expected 2"),
        ({"_class_name": "DDIMScheduler"}, "the scheduler is a DDIMScheduler, expected a UniPC"),
    ],
)
def test_what_is_not_built_is_refused_by_name(config, message):
    with pytest.raises(UnsupportedConfig, match=message):
        solver_of(config, 4)


def test_the_published_config_of_wan_is_read():
    """As saved by diffusers, with every setting written out."""
    scheduler = unipc(4, 5.0)
    config = {name: value for name, value in dict(scheduler.config).items() if value is not None}
    schedule, step = solver_of({"_class_name": "UniPCMultistepScheduler", **config}, 4)
    assert schedule.sigmas == tuple(scheduler.sigmas.tolist())
    sample = torch.ones(SHAPE)
    torch.testing.assert_close(step(0, sample, sample), scheduler.step(sample, scheduler.timesteps[0], sample)[0])
