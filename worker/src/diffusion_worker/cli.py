# SPDX-License-Identifier: Apache-2.0
"""The command line `diffusion-worker`. Options are checked before anything is started; an error is one line and exit code 1."""

import enum
import gc
import logging
import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from diffusion_worker import withheld
from diffusion_worker.config import (
    CLAIMS_DIR,
    SECRETS_DIR,
    Compile,
    Device,
    LoadFormat,
    Offload,
    OnMissing,
    Quantization,
    QueueLimits,
    StartMethod,
    StepCache,
    WorkerConfig,
)
from diffusion_worker.errors import ConfigError
from diffusion_worker.options import check_options, check_places, config_of, parse_dtypes, parse_size
from diffusion_worker.sources.options import locate_model

MAX_RANKS = 64
PORT = click.IntRange(0, 65535)
KIND_SIZE = click.IntRange(1, 16)

F = TypeVar("F", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """The click type of a number between two bounds. It refuses nan too, which passes the comparisons with both."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


SECONDS = NumberRange(min=0.001, max=86_400)
GUIDANCE_SCALE = NumberRange(0, 100)


def _variable(option: str) -> dict[str, Any]:
    """Return the arguments of a click option which the variable `DIFFUSION_WORKER_<OPTION>` sets too.

    An older image ignores an unknown variable, but refuses an unknown option.
    """
    return {"envvar": f"DIFFUSION_WORKER_{option.removeprefix('--').replace('-', '_').upper()}", "show_envvar": True}


def _bound(option: str, kind: click.ParamType[Any], default: float, text: str) -> Callable[[F], F]:
    """Return the decorator for a click option of type `kind` with the help `text`, which its variable sets too."""
    return click.option(option, type=kind, default=default, help=text, **_variable(option))


def _choice(option: str, default: enum.StrEnum, text: str, *, variable: bool = False) -> Callable[[F], F]:
    """Return the decorator for a click option with one of the values of the default's class; `variable`: its variable sets it too."""
    values = [each.value for each in type(default)]
    return click.option(option, type=click.Choice(values), default=default.value, help=text, **(_variable(option) if variable else {}))


# Options of `serve` and of `memory`.
_MAX_LORAS = click.option(
    "--max-loras",
    type=click.IntRange(0, 1024),
    default=4,
    help="Most adapters that running requests use at once; 0: none can be loaded.",
)
_MAX_LORA_RANK = click.option(
    "--max-lora-rank",
    type=click.IntRange(1, 4096),
    default=64,
    help="Largest rank (inner dimension) that an adapter may have.",
)


@click.group()
@click.version_option(package_name="diffusion-worker")
def cli() -> None:
    """Serve one diffusion model on a group of ranks."""


@cli.command(context_settings={"show_default": True})
@click.argument("model", required=False, metavar="[SOURCE]")
@click.option("--model", "model_option", metavar="SOURCE", help="A diffusers folder: a path, hf://, s3://, pvc:// or JSON; same as SOURCE.")
@click.option(
    "--served-name",
    "served_names",
    multiple=True,
    metavar="NAME",
    help="The model's name in requests; by default the name of its folder or of its repository, without the owner. "
    "May be repeated: further names ask for the same model, and answers name the first.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, MAX_RANKS),
    default=1,
    help="Number of rank processes that hold the model and compute together, each on a GPU of its own if there are GPUs.",
)
@click.option(
    "--tensor",
    type=KIND_SIZE,
    default=1,
    help="Number of ranks among which the large layers of the model are split; 1: not split.",
)
@click.option(
    "--sequence",
    type=KIND_SIZE,
    default=1,
    help="Number of ranks among which the tokens of an image are split; 1: not split.",
)
@click.option(
    "--shard",
    type=KIND_SIZE,
    default=1,
    help="Number of ranks among which all weights are split, so that each holds a part; 1: not split.",
)
@click.option("--vae-tiling", is_flag=True, help="Decode large images in tiles, spread over the ranks.")
@click.option(
    "--lora",
    "loras",
    multiple=True,
    metavar="NAME=SOURCE",
    help="An adapter to load at start, may be repeated: a path, hf://, s3://, pvc://, https:// or JSON.",
)
@click.option(
    "--desired",
    "desired_path",
    metavar="FILE",
    help="JSON file with the sleep policy, the handling of requests during a sleep, and adapters; read again when it changes.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="auto|float32|float16|bfloat16|COMPONENT=DTYPE",
    help=(
        "Type of the weights in memory; repeated as COMPONENT=DTYPE, as in vae=float32, the type of one component. "
        "The default is auto: bfloat16 on a GPU, float32 on a CPU and for the components that need it."
    ),
)
@_choice(
    "--device",
    Device.AUTO,
    "Device of the ranks. If torch finds no GPU, cuda ends the worker with an error, and auto computes on the CPU.",
    variable=True,
)
@_choice(
    "--start-method",
    StartMethod.AUTO,
    "Way to start rank processes: auto is spawn where there seems to be a GPU, else forkserver, which is faster and only for CPUs.",
    variable=True,
)
@click.option(
    "--standby-ranks",
    type=click.IntRange(0, MAX_RANKS),
    **_variable("--standby-ranks"),
    help="Number of spare processes that have finished their imports and become ranks when the ranks are lost, only with spawn. "
    "The default is one for each rank on a GPU, and none on a CPU.",
)
@click.option(
    "--pipeline",
    default="auto",
    metavar="auto|CLASS|MODULE:CLASS",
    help="The pipeline's class: that of the model's index (auto), one of diffusers, or with --load-format custom-pipeline your own.",
)
@_choice(
    "--load-format",
    LoadFormat.DEFAULT,
    "Read the model's weights (default), make random ones (dummy), or run the class of --pipeline (custom-pipeline).",
)
@click.option(
    "--max-batch-size",
    type=click.IntRange(1, 4096),
    default=8,
    help="Most images, of one or several requests, that share one denoising step.",
)
@click.option(
    "--batch-window-milliseconds",
    type=click.IntRange(0, 1000),
    default=0,
    help="Longest time that the first step of a request waits for others to share it; a request that can join running ones joins at once.",
)
@click.option("--exact", is_flag=True, help="Run each request's model calls alone; with one rank, images equal diffusers' bit for bit.")
@click.option(
    "--check-sharing",
    is_flag=True,
    **_variable("--check-sharing"),
    help="For trying out a custom pipeline: find requests that change attributes of the shared model, and run them alone. "
    "Costs milliseconds at every model call.",
)
@click.option(
    "--prompt-cache-size",
    type=click.IntRange(0, 65_536),
    default=32,
    help="Most results of text encoders that each rank keeps for prompts that come again; 0: none.",
)
@_choice(
    "--compile",
    Compile.NONE,
    "Compile the denoiser's repeated blocks with torch; max-autotune takes longer and looks for faster kernels.",
)
@_choice(
    "--offload",
    Offload.NONE,
    "Keep weights in host memory, and bring a component (model) or a block (group) at a time to the GPU. Excludes sleep.",
)
@_choice(
    "--quantization",
    Quantization.NONE,
    "Store the weights of the denoiser's linear layers in fewer bits.",
)
@_choice(
    "--step-cache",
    StepCache.NONE,
    "Let a step reuse what earlier steps of the same request computed, unless the request's quality asks for every step.",
)
@click.option(
    "--warmup-steps",
    type=click.IntRange(0, 200),
    default=1,
    help="Denoising steps of the request that warms the model up before the worker is ready; 0: no warm-up.",
)
@click.option(
    "--warmup-size",
    "warmup_sizes",
    multiple=True,
    metavar="WIDTHxHEIGHT",
    help="Size of the warm-up's images; may be repeated, for one request each. The default is the model's own size.",
)
@click.option(
    "--default-steps",
    type=click.IntRange(1, 10_000),
    help="Denoising steps of a request that gives none. The default is the pipeline's own number, but at most --max-steps.",
)
@click.option(
    "--default-guidance-scale", type=GUIDANCE_SCALE, help="Guidance scale of a request that gives none; by default the pipeline's own."
)
@click.option("--default-size", metavar="WIDTHxHEIGHT", help="Size of the images of a request that gives none; by default the model's own.")
@click.option("--max-steps", type=click.IntRange(1, 10_000), default=200, help="Most denoising steps a request may ask for.")
@click.option(
    "--max-pixels",
    type=click.IntRange(64, 1 << 30),
    default=4_194_304,
    help="Most pixels, width times height, of an image that a request asks for.",
)
@click.option("--max-images", type=click.IntRange(1, 64), default=10, help="Most images a request may ask for.")
@click.option(
    "--max-prompt-characters",
    type=click.IntRange(1, 1_000_000),
    default=8192,
    help="Most characters of a prompt, and of a negative prompt.",
)
@_bound(
    "--max-queued",
    click.IntRange(1, 1_000_000),
    QueueLimits().max_queued,
    "Most requests that wait for their first step; further ones get 429 with Retry-After.",
)
@_bound(
    "--max-queued-seconds",
    NumberRange(min=1, max=604_800),
    QueueLimits().max_queued_seconds,
    "Most seconds of work that all waiting and running requests may need, estimated from measured steps; further ones get 429.",
)
@_bound(
    "--max-queued-bytes",
    click.IntRange(1, 1 << 50),
    QueueLimits().max_queued_bytes,
    "Most bytes that the decoded input images of all waiting and running requests may take; further ones get 429.",
)
@_bound(
    "--max-connections",
    click.IntRange(1, 1_000_000),
    900,
    "Most connections of the data port; a request on another one gets 429, unless it is a probe or for /metrics.",
)
@click.option(
    "--api-key-file",
    "api_key_path",
    metavar="FILE",
    help="A file with the API key that requests to /v1/ of the data port must send; without it, no key is needed.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    **_variable("--cors-origin"),
    help="An origin, as https://app.example, whose web pages may call the data port from a browser, or * for any; may be repeated.",
)
@click.option("--ui/--no-ui", default=True, help="Serve a web page for trying out the model, at / of the data port.")
@_MAX_LORAS
@click.option(
    "--max-cached-loras",
    type=click.IntRange(0, 100_000),
    help="Most adapters that are kept in host memory, at least --max-loras; by default 16, or --max-loras if that is more.",
)
@click.option(
    "--max-loras-per-request",
    type=click.IntRange(1, 64),
    help="Most adapters that one request may mix; by default 4, or --max-loras if that is less.",
)
@_MAX_LORA_RANK
@click.option(
    "--lora-target-module",
    "lora_target_modules",
    multiple=True,
    metavar="NAME",
    help="The end of the names of layers that adapters may change, as in to_q; may be repeated. The default is any layer.",
)
@_choice(
    "--lora-on-missing",
    OnMissing.REJECT,
    "A request for an adapter that the worker knows but has not in memory gets 503 (reject), or waits for its load (load).",
)
@click.option(
    "--lora-load-timeout-seconds",
    "lora_load_timeout_s",
    type=SECONDS,
    default=120.0,
    help="Time limit to fetch and load an adapter where the call for it gives none, and for a request that waits for the load.",
)
@click.option(
    "--cache-dir",
    metavar="PATH",
    help="Folder that keeps fetched models and adapters. The default is a temporary one, which is deleted when the worker ends.",
)
@click.option(
    "--cache-size-bytes",
    type=click.IntRange(min=1),
    help="Size above which files that are not in use are removed from --cache-dir; by default only when the disk is full.",
)
@click.option(
    "--secrets-dir",
    default=SECRETS_DIR,
    metavar="PATH",
    help="Folder with a subfolder for each Secret that sources name; a key of the Secret is a file there.",
)
@click.option(
    "--claims-dir",
    default=CLAIMS_DIR,
    metavar="PATH",
    help="Folder with a subfolder for each PersistentVolumeClaim that sources name (pvc://), where it is mounted.",
)
@click.option(
    "--allow-http-sources", is_flag=True, help="Allow sources with http:// addresses, not only https://. For tests and closed networks."
)
@click.option(
    "--host",
    default="0.0.0.0",
    help="Address on which the data port listens, and with --control-token-file the control port too.",
)
@click.option("--port", type=PORT, default=8000, help="The data port: images, models, probes, metrics; 0 takes a free one.")
@click.option(
    "--control-port",
    type=PORT,
    default=8001,
    help="The control port: state, sleep, wake, adapters; 0 takes a free one. It is for the operator, not for clients.",
)
@click.option(
    "--control-token-file",
    "control_token_path",
    metavar="FILE",
    help="A file with the token that calls to the control port must send; without it, that port listens on 127.0.0.1 only.",
)
@click.option(
    "--state-dir",
    metavar="PATH",
    help="Folder in which the worker records that its model sleeps. A restart begins asleep then, unless the sleep policy is AlwaysAwake.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0, 100_000),
    default=5,
    help="Most restarts of all ranks, after a rank was lost, within ten minutes; the next loss ends the worker with exit code 70.",
)
@click.option(
    "--rendezvous-address",
    default="127.0.0.1:0",
    metavar="HOST:PORT",
    help="Address at which the rank processes connect to each other; port 0 takes a free one.",
)
@click.option(
    "--worker-extension",
    metavar="MODULE:CLASS",
    help="A Python class that is mixed into every rank's worker, so that scripts can call its methods there.",
)
@click.option(
    "--profile-dir",
    metavar="PATH",
    help="Folder for the traces that POST /v1/profile of the control port takes; without it none are taken.",
)
@click.option(
    "--startup-timeout-seconds",
    "startup_timeout_s",
    type=SECONDS,
    default=1800.0,
    help="Time limit of each stage of the start: fetching the model, loading it, warming it up.",
)
@click.option(
    "--tick-timeout-seconds",
    "tick_timeout_s",
    type=SECONDS,
    help="Time after which a step that is not finished counts as hung, and all ranks are restarted. "
    "The default is three times the expected time of the whole request, and at least 60 seconds.",
)
@click.option(
    "--drain-timeout-seconds",
    "drain_timeout_s",
    type=SECONDS,
    default=25.0,
    help="Time that accepted requests may take to finish after SIGTERM; requests that are held until the model serves are refused.",
)
@click.option(
    "--check",
    "check_only",
    is_flag=True,
    help="Check the options and end, without a look at the files, folders and sources that they name.",
)
def serve(*, host: str, port: int, control_port: int, check_only: bool, **options: Any) -> None:
    """Serve the model at SOURCE: images on the data port, state and control on the control port."""
    config = config_of(options)
    check_options(config)
    if check_only:
        return
    check_places(config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    withheld.install()
    # This process loads no model, so no message of a library is needed from here on.
    withheld.withhold()
    # Looking for garbage among modules takes a fifth of their imports' time. `run` allows it again.
    gc.disable()
    # Imported late, so that a wrong option is reported at once.
    from diffusion_worker.ranks.executor import RankExecutor
    from diffusion_worker.server.serve import Listen, run

    sys.exit(run(config, Listen(host=host, port=port, control_port=control_port), lambda: RankExecutor(config)))


@cli.command(context_settings={"show_default": True})
@click.argument("model", metavar="FOLDER")
@click.option("--size", metavar="WIDTHxHEIGHT", help="Size of the images; by default the model's own.")
@click.option("--dtype", "dtypes", multiple=True, metavar="[COMPONENT=]DTYPE", help="As for `serve`; by default bfloat16, as on a GPU.")
@_MAX_LORAS
@_MAX_LORA_RANK
def memory(model: str, size: str | None, dtypes: tuple[str, ...], max_loras: int, max_lora_rank: int) -> None:
    """Print the memory that a model needs on a GPU, by the headers of its files."""
    place = locate_model(model, "")
    if place.source is not None:
        raise ConfigError(f"expected a local diffusers folder, found {model!r}; fetch the model first")
    wanted = parse_size(size, "--size") if size else None
    config = WorkerConfig(model=place.folder, served_name="model", max_loras=max_loras, max_lora_rank=max_lora_rank, **parse_dtypes(dtypes))
    from diffusion_worker.runner.memory_estimate import estimate

    found = estimate(config, wanted)
    weights = sum(found.weights.values())
    rows: list[tuple[str, int | None]] = [(f"weights of {name}", size_bytes) for name, size_bytes in found.weights.items()]
    rows.append((f"weights in {found.dtype}, in all", weights))
    rows.append((f"slots for {max_loras} adapters of rank {max_lora_rank}, at most", found.slots))
    rows.append((f"decoding an image of {found.width}x{found.height}", found.decode))
    rows.append(("together, without CUDA's own memory", weights + found.slots + (found.decode or 0)))
    for what, size_bytes in rows:
        click.echo(f"{what:50} " + ("   unknown" if size_bytes is None else f"{size_bytes / 1e9:7.3f} GB"))
    click.echo("These figures are computed, and none was measured on a GPU. A step of the denoiser mostly needs less than the decoding.")
    click.echo("A worker reports what its images needed: the metric diffusion_worker_image_peak_bytes.")


def main() -> None:
    """Run the command line. An error in the user's input is written to stderr without a traceback, and the exit code is 1.

    Ctrl-C, where the command does not handle it, ends the process with 130.
    """
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(1)
    except ConfigError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)


if __name__ == "__main__":
    main()
