# SPDX-License-Identifier: Apache-2.0
"""Schedulers of diffusers that look up their tables by the time. Read in diffusers 0.42.1; the rehearsal shows their waits."""

from diffusion_worker.runner.families.record import Record, SchedulerRecord

RECORDS: tuple[Record, ...] = (
    SchedulerRecord("CogVideoXDDIMScheduler"),
    SchedulerRecord("DDIMInverseScheduler"),
    SchedulerRecord("DDIMParallelScheduler"),
    SchedulerRecord("DDIMScheduler"),
    SchedulerRecord("DDPMParallelScheduler"),
    SchedulerRecord("DDPMScheduler"),
    SchedulerRecord("FlowMapEulerDiscreteScheduler"),
    SchedulerRecord("LCMScheduler"),
    SchedulerRecord("PNDMScheduler"),
    SchedulerRecord("SASolverScheduler"),
    SchedulerRecord("TCDScheduler"),
    SchedulerRecord("UnCLIPScheduler"),
)
