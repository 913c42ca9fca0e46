# SPDX-License-Identifier: Apache-2.0
"""The command line refuses what is wrong before anything starts: one line that names the option, exit code 1."""

import subprocess
import sys
from pathlib import Path

import pytest

from diffusion_worker import cli
from diffusion_worker.config import Device, Dtype, OnMissing, RequestDefaults, RequestLimits, StartMethod, WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.options import parse_loras
from support.worker.process import DIGITS, DIGITS_MODEL


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the program with these arguments, which it must refuse with exit code 1; return its error."""
    monkeypatch.setattr(sys, "argv", ["diffusion-worker", "serve", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 1
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def config_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> WorkerConfig:
    """Run the program with these arguments, without starting a server, and return the settings with which it would serve."""
    started: list[WorkerConfig] = []
    monkeypatch.setattr("diffusion_worker.server.serve.run", lambda config, listen, make_ranks: started.append(config) or 0)
    monkeypatch.setattr(sys, "argv", ["diffusion-worker", "serve", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    [config] = started
    return config


def test_the_model_may_be_given_plainly_or_as_an_option_and_only_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config_of(monkeypatch, str(DIGITS_MODEL)) == config_of(monkeypatch, f"--model={DIGITS_MODEL}")
    assert "found none" in refusal(monkeypatch, capsys)
    assert "found a and b" in refusal(monkeypatch, capsys, "a", "--model=b")


def test_a_component_may_have_a_dtype_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = f"--model={DIGITS_MODEL}"
    assert config_of(monkeypatch, model).dtype is Dtype.AUTO
    found = config_of(monkeypatch, model, "--dtype=vae=float32", "--dtype=bfloat16", "--dtype=text_encoder=float16")
    assert (found.dtype, found.component_dtypes) == (Dtype.BFLOAT16, {"vae": Dtype.FLOAT32, "text_encoder": Dtype.FLOAT16})


def test_allowed_origins_come_from_options_or_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = f"--model={DIGITS_MODEL}"
    given = ("--cors-origin=https://App.example:8443", "--cors-origin=*")
    assert config_of(monkeypatch, model, *given).cors_origins == ["https://app.example:8443", "*"]
    monkeypatch.setenv("DIFFUSION_WORKER_CORS_ORIGIN", "https://a.example http://localhost:3000")
    assert config_of(monkeypatch, model).cors_origins == ["https://a.example", "http://localhost:3000"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--model"),
        (["--ranks=0"], "--ranks"),
        (["--cors-origin=https://app.example/"], "--cors-origin: expected an origin without a path"),
        (["--cors-origin=app.example"], "--cors-origin: expected an origin without a path"),
        (["--ranks=65"], "--ranks"),
        (["--ranks=two"], "--ranks"),
        (["--port=65536"], "--port"),
        (["--control-port=-1"], "--control-port"),
        (["--dtype=int8"], "--dtype 'int8': expected one of auto, float32, float16, bfloat16, or COMPONENT=DTYPE, found 'int8'"),
        (["--dtype=vae=int8"], "--dtype 'vae=int8': expected one of float32, float16, bfloat16, found 'int8'"),
        (["--dtype=vae=auto"], "--dtype 'vae=auto': expected one of float32, float16, bfloat16, found 'auto'"),
        (["--dtype=my vae=float32"], "--dtype 'my vae=float32': expected COMPONENT=DTYPE, as vae=float32"),
        (["--dtype=float32", "--dtype=float16"], "--dtype 'float16': the dtype of all components is given twice"),
        (["--dtype=vae=float32", "--dtype=vae=float16"], "--dtype 'vae=float16': the dtype of vae is given twice"),
        (["--start-method=fork"], "'fork' is not one of 'auto', 'spawn', 'forkserver'"),
        (["--device=gpu"], "--device"),
        (["--start-method=fork"], "--start-method"),
        (["--standby-ranks=65"], "--standby-ranks"),
        (["--standby-ranks=1", "--start-method=forkserver"], "--standby-ranks: expected 0 with --start-method forkserver"),
        (["--load-format=peft"], "--load-format"),
        (["--load-format=custom-pipeline"], "--load-format custom-pipeline: expected --pipeline with an import path"),
        (["--pipeline=my.module:Pipeline"], "--pipeline 'my.module:Pipeline': expected a class of diffusers"),
        (["--max-batch-size=0"], "--max-batch-size"),
        (["--prompt-cache-size=-1"], "--prompt-cache-size"),
        (["--step-cache=tea"], "--step-cache"),
        (["--step-cache=first-block", "--exact"], "--step-cache first-block with --exact"),
        (["--step-cache=taylor-seer", "--sequence=2", "--ranks=2"], "--step-cache taylor-seer with --sequence 2: not supported together"),
        (["--batch-window-milliseconds=1001"], "--batch-window-milliseconds"),
        (["--batch-window-milliseconds=-1"], "--batch-window-milliseconds"),
        (["--tick-timeout-seconds=0"], "--tick-timeout-seconds"),
        (["--startup-timeout-seconds=0"], "--startup-timeout-seconds"),
        (["--lora=stripes"], "--lora 'stripes': expected NAME=SOURCE"),
        (["--lora=stripes="], "--lora 'stripes=': expected NAME=SOURCE"),
        (["--lora=Stripes=/x"], "'Stripes'"),
        (["--lora=a=/x", "--lora=a=/y"], "given twice"),
        (["--lora=a=/nowhere"], "--lora a=/nowhere: expected an adapter's folder or *.safetensors file, found nothing"),
        ([f"--lora=a={DIGITS_MODEL / 'model_index.json'}"], "found a file 'model_index.json'"),
        (["--lora=a=ftp://host/x"], "--lora a=ftp://host/x: expected a path, hf://"),
        (["--lora=a=https://host/x?sig=secret"], "--lora a=https://host/x: expected the digest of the file"),
        ([f"--lora=a=http://host/x#sha256={'0' * 64}"], "expected a source over https, found 'http'; --allow-http-sources allows http"),
        (
            ['--lora=a={"path": "/x", "pvc": {"claimName": "c", "path": "."}}'],
            "exactly one of path, huggingFace, s3, pvc and http, found path and pvc",
        ),
        (['--lora=a={"pvc": {"claimName": "../c", "path": "."}}'], "pvc.claimName: expected a name without slashes, found '../c'"),
        (['--lora=a={"huggingFace": {"repo": "a/b", "tokenSecretRef": {"name": "a/b"}}}'], "huggingFace.tokenSecretRef.name: expected"),
        (['--lora=a={"s3": {"uri": "s3://b/k", "credentialsSecretRef": {"name": ".."}}}'], "s3.credentialsSecretRef.name: expected"),
        (["--max-loras=0", f"--lora=a={DIGITS / 'loras' / 'stripes'}"], "1 adapters, but --max-loras is 0"),
        (["--cache-dir=/nowhere"], "--cache-dir: expected a folder that can be written to, found '/nowhere'"),
        ([f"--lora=digits={DIGITS / 'loras' / 'stripes'}", "--served-name=digits"], "the name is a served name of the model"),
        (["--max-cached-loras=4", *(f"--lora={name}=s3://b/k" for name in "abcde")], "5 adapters, but --max-cached-loras is 4"),
        (["--max-cached-loras=3"], "--max-cached-loras: expected at least --max-loras 4, found 3"),
        (["--max-loras-per-request=5"], "--max-loras-per-request: expected at most --max-loras 4, found 5"),
        (["--lora-on-missing=base"], "--lora-on-missing"),
        (["--lora-load-timeout-seconds=0"], "--lora-load-timeout-seconds"),
        (["--cache-size-bytes=0"], "--cache-size-bytes"),
        (["--served-name=two words"], "--served-name"),
        (["--served-name=digits", "--served-name=/images"], "--served-name: expected letters, digits"),
        (["--desired=/nowhere.json"], "--desired"),
        (["--max-restarts=-1"], "--max-restarts"),
        (["--rendezvous-address=here"], "--rendezvous-address: expected HOST:PORT"),
        (["--rendezvous-address=:80"], "--rendezvous-address"),
        (["--rendezvous-address=10.0.0.1:65536"], "--rendezvous-address"),
        (["--worker-extension=module.Class"], "--worker-extension: expected MODULE:CLASS"),
        (["--worker-extension=../x:Y"], "--worker-extension"),
        (["--profile-dir=/nowhere"], "--profile-dir: expected a folder that can be written to"),
        (["--no-such-option"], "--no-such-option"),
        (["--default-steps=0"], "--default-steps"),
        (["--default-steps=6", "--max-steps=5"], "--default-steps: expected at most --max-steps 5, found 6"),
        (["--default-guidance-scale=101"], "--default-guidance-scale"),
        (["--default-guidance-scale=nan"], "--default-guidance-scale"),
        (["--drain-timeout-seconds=nan"], "--drain-timeout-seconds"),
        (["--default-size=64"], "--default-size: expected WIDTHxHEIGHT in pixels, found '64'"),
        (["--default-size=65x64", "--max-pixels=4096"], "--default-size: expected at most --max-pixels 4096, found 65x64"),
        (["--max-steps=0"], "--max-steps"),
        (["--max-pixels=63"], "--max-pixels"),
        (["--max-images=65"], "--max-images"),
        (["--max-prompt-characters=0"], "--max-prompt-characters"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    model = [f"--model={DIGITS_MODEL}"] if arguments else []
    assert says in refusal(monkeypatch, capsys, *model, *arguments)


def test_a_model_path_that_is_no_diffusers_folder_is_refused_with_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "found nothing there" in refusal(monkeypatch, capsys, "--model=/nowhere")
    assert "found no model_index.json" in refusal(monkeypatch, capsys, f"--model={tmp_path}")
    index = tmp_path / "model_index.json"
    assert "found a file" in refusal(monkeypatch, capsys, f"--model={DIGITS_MODEL / 'model_index.json'}")
    for content in ("", "{", "[]", "{}", '{"_class_name": 5}', "\x00"):
        index.write_text(content)
        said = refusal(monkeypatch, capsys, f"--model={tmp_path}")
        assert said.startswith(f"Error: --model: UnsupportedFormat: model path {str(tmp_path)!r}: model_index.json ")


def test_adapters_are_parsed_with_equals_signs_in_their_path() -> None:
    assert parse_loras(("a=/x=y", "b.c-d_1=z")) == {"a": "/x=y", "b.c-d_1": "z"}
    with pytest.raises(ConfigError, match="expected a name of"):
        parse_loras(("=x",))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            f"https://host/x#sha256={'0' * 64}",
            "--model: an http address is not supported for a model, because it gives one file and a model is a folder",
        ),
        ("pvc://weights/sd", "/weights/sd': expected a diffusers folder, found nothing there"),
        ('{"s3": {"uri": "s3://b/m/", "endpoint": "http://minio"}}', "--model: expected a source over https, found 'http'"),
        ('{"hub": "x"}', "--model: expected a source as a JSON object"),
        ("hf://sd", "--model: expected hf://org/name@revision"),
    ],
)
def test_a_model_source_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, says: str
) -> None:
    assert says in refusal(monkeypatch, capsys, f"--model={model}")


def test_a_model_from_elsewhere_is_named_after_its_source_and_has_a_path_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(monkeypatch, "--model=hf://org/tiny@v1")
    assert (config.model_source, config.served_name, Path(config.model).exists()) == ("hf://org/tiny@v1", "tiny", False)
    assert config_of(monkeypatch, "--model=s3://bucket/models/tiny-2/").served_name == "tiny-2"


def test_a_model_on_a_claim_is_a_folder_below_the_claims(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "weights").symlink_to(DIGITS)
    config = config_of(monkeypatch, "--model=pvc://weights/model", f"--claims-dir={tmp_path}")
    assert (config.model, config.model_source, config.served_name) == (str(tmp_path / "weights" / "model"), None, "model")


def test_options_of_adapters_and_sources_reach_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = [
        "--max-loras=3",
        "--max-cached-loras=5",
        "--max-loras-per-request=2",
        "--lora-target-module=to_q",
        "--lora-target-module=to_v",
    ]
    options += [
        "--lora-on-missing=load",
        "--lora-load-timeout-seconds=7",
        f"--cache-dir={tmp_path}",
        "--cache-size-bytes=9",
    ]
    options += ["--secrets-dir=/s", "--claims-dir=/c", "--allow-http-sources", "--lora=a=s3://bucket/a.safetensors"]
    config = config_of(monkeypatch, f"--model={DIGITS_MODEL}", *options)
    assert (config.max_loras, config.max_cached_loras, config.max_loras_per_request) == (3, 5, 2)
    assert (config.lora_target_modules, config.lora_on_missing, config.lora_load_timeout_s) == (["to_q", "to_v"], OnMissing.LOAD, 7)
    assert (config.cache_dir, config.cache_size_bytes) == (str(tmp_path), 9)
    assert (config.secrets_dir, config.claims_dir, config.allow_http_sources) == ("/s", "/c", True)
    assert config.preload_loras == {"a": "s3://bucket/a.safetensors"}


@pytest.mark.parametrize(("slots", "cached", "per_request"), [(4, 16, 4), (1, 16, 1), (40, 40, 4), (0, 16, 4)])
def test_the_number_of_slots_alone_is_enough(monkeypatch: pytest.MonkeyPatch, slots: int, cached: int, per_request: int) -> None:
    config = config_of(monkeypatch, f"--model={DIGITS_MODEL}", f"--max-loras={slots}")
    assert (config.max_cached_loras, config.max_loras_per_request) == (cached, per_request)


def test_help_lists_the_options_and_exits_with_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["diffusion-worker", "serve", "--help"])
    cli.main()
    assert "--control-token-file" in capsys.readouterr().out


def test_the_command_line_and_the_server_import_nothing_heavy() -> None:
    heavy = {"torch", "diffusers", "transformers", "numpy", "safetensors", "huggingface_hub", "obstore", "httpx2"}
    program = (
        "import sys, diffusion_worker.cli, diffusion_worker.server.serve, diffusion_worker.ranks.executor\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_device_and_the_start_of_ranks_are_options_or_variables_and_the_option_wins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"--model={DIGITS_MODEL}"
    usual = config_of(monkeypatch, model)
    assert (usual.device, usual.start_method, usual.standby_ranks) == (Device.AUTO, StartMethod.AUTO, None)
    monkeypatch.setenv("DIFFUSION_WORKER_DEVICE", "cuda")
    monkeypatch.setenv("DIFFUSION_WORKER_START_METHOD", "forkserver")
    found = config_of(monkeypatch, model)
    assert (found.device, found.start_method) == (Device.CUDA, StartMethod.FORKSERVER)
    monkeypatch.setenv("DIFFUSION_WORKER_STANDBY_RANKS", "3")
    given = config_of(monkeypatch, model, "--device=cpu", "--start-method=spawn")
    assert (given.device, given.start_method, given.standby_ranks) == (Device.CPU, StartMethod.SPAWN, 3)
    assert config_of(monkeypatch, model, "--start-method=spawn", "--standby-ranks=0").standby_ranks == 0
    monkeypatch.setenv("DIFFUSION_WORKER_DEVICE", "gpu")
    said = refusal(monkeypatch, capsys, model)
    assert "DIFFUSION_WORKER_DEVICE" in said and "'gpu' is not one of 'auto', 'cuda', 'cpu'" in said


def test_options_of_the_ranks_reach_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--max-restarts=7", "--rendezvous-address=10.0.0.1:29500", "--worker-extension=a.b:C", f"--profile-dir={tmp_path}"]
    config = config_of(monkeypatch, f"--model={DIGITS_MODEL}", *options)
    assert (config.max_restarts, config.rendezvous_host, config.rendezvous_port) == (7, "10.0.0.1", 29500)
    assert (config.worker_extension, config.profile_dir) == ("a.b:C", str(tmp_path))
    assert not config.check_sharing


def test_sharing_is_checked_by_an_option_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of(monkeypatch, f"--model={DIGITS_MODEL}", "--check-sharing").check_sharing
    monkeypatch.setenv("DIFFUSION_WORKER_CHECK_SHARING", "1")
    assert config_of(monkeypatch, f"--model={DIGITS_MODEL}").check_sharing


def test_defaults_limits_and_the_key_reach_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--default-steps=5", "--default-guidance-scale=2.5", "--default-size=48x32", f"--api-key-file={tmp_path / 'key'}"]
    options += ["--max-steps=6", "--max-pixels=4096", "--max-images=2", "--max-prompt-characters=10"]
    config = config_of(monkeypatch, f"--model={DIGITS_MODEL}", *options)
    assert config.defaults == RequestDefaults(steps=5, guidance_scale=2.5, width=48, height=32)
    assert config.limits == RequestLimits(max_steps=6, max_pixels=4096, max_images=2, max_prompt_chars=10)
    assert config.api_key_path == str(tmp_path / "key")


def test_a_state_dir_is_made_where_it_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "worker"
    config = config_of(monkeypatch, f"--model={DIGITS_MODEL}", f"--state-dir={folder}")
    assert (config.state_dir, folder.is_dir()) == (str(folder), True)


def test_a_state_dir_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refusal(monkeypatch, capsys, f"--model={DIGITS_MODEL}", f"--state-dir={tmp_path / 'file'}")
    assert "--state-dir: expected a folder, or a place for one, found" in said


@pytest.mark.parametrize("policy", ["Asleep", "OnIdle"])
def test_a_policy_under_which_a_model_sleeps_excludes_options_that_keep_it_awake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, policy: str
) -> None:
    desired = tmp_path / "desired.json"
    desired.write_text(f'{{"sleep": {{"policy": "{policy}"}}}}')
    said = refusal(monkeypatch, capsys, f"--model={DIGITS_MODEL}", "--offload=model", f"--desired={desired}")
    assert f"--offload model: not supported with the sleep policy {policy} of" in said


NOWHERE = ["--cache-dir=/none", "--state-dir=/none/state", "--desired=/none/desired.json", "--control-token-file=/none/token"]


@pytest.mark.parametrize("model", ["/none", '{"pvc":{"claimName":"c","path":"m"}}', "hf://org/name"])
def test_a_check_of_options_looks_at_no_place_that_they_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    pipeline = ["--load-format=custom-pipeline", "--pipeline=not_installed:Class"]
    monkeypatch.setattr(sys, "argv", ["diffusion-worker", "serve", "--check", f"--model={model}", *NOWHERE, *pipeline])
    assert cli.main() is None, "it ends with 0"
    assert "--max-steps" in refusal(monkeypatch, capsys, "--check", f"--model={model}", *NOWHERE, "--max-steps=0")
    assert "--default-size" in refusal(monkeypatch, capsys, "--check", f"--model={model}", *NOWHERE, "--default-size=9999x9999")
