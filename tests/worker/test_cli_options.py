# SPDX-License-Identifier: Apache-2.0
"""The command line refuses what is wrong before anything starts: one line that names the option, exit code 1."""

import subprocess
import sys
from pathlib import Path

import pytest

from diffusion_worker import cli
from diffusion_worker.config import RequestDefaults, RequestLimits, WorkerConfig
from diffusion_worker.errors import ConfigError
from worker_process import DIGITS, DIGITS_MODEL


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the program says to these arguments; it must exit with 1."""
    monkeypatch.setattr(sys, "argv", ["diffusion-worker", "serve", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 1
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--model"),
        (["--ranks=0"], "--ranks"),
        (["--ranks=65"], "--ranks"),
        (["--ranks=two"], "--ranks"),
        (["--port=65536"], "--port"),
        (["--control-port=-1"], "--control-port"),
        (["--dtype=int8"], "--dtype"),
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
        (["--lora=stripes"], "--lora 'stripes': expected NAME=PATH"),
        (["--lora=stripes="], "--lora 'stripes=': expected NAME=PATH"),
        (["--lora=Stripes=/x"], "'Stripes'"),
        (["--lora=a=/x", "--lora=a=/y"], "given twice"),
        (["--lora=a=/nowhere"], "--lora a=/nowhere: expected a peft folder, found nothing there"),
        ([f"--lora=a={DIGITS_MODEL / 'model_index.json'}"], "found a file"),
        ([f"--lora=digits={DIGITS / 'loras' / 'stripes'}", "--served-name=digits"], "the name is that of the model"),
        (["--max-loras=1", *(f"--lora={name}={DIGITS / 'loras' / 'stripes'}" for name in "ab")], "--max-loras is 1"),
        (["--served-name=two words"], "--served-name"),
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
        assert said.startswith(f"Error: --model: model path {str(tmp_path)!r}: model_index.json ")


def test_adapters_are_parsed_with_equals_signs_in_their_path() -> None:
    assert cli.parse_loras(("a=/x=y", "b.c-d_1=z")) == {"a": "/x=y", "b.c-d_1": "z"}
    with pytest.raises(ConfigError, match="expected a name of"):
        cli.parse_loras(("=x",))


def test_help_lists_the_options_and_exits_with_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["diffusion-worker", "serve", "--help"])
    cli.main()
    assert "--control-token-file" in capsys.readouterr().out


def test_the_command_line_and_the_server_import_no_torch() -> None:
    program = (
        "import sys, diffusion_worker.cli, diffusion_worker.server.serve, diffusion_worker.ranks.executor\n"
        "print(sorted({'torch', 'diffusers', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_options_of_the_ranks_reach_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[WorkerConfig] = []
    monkeypatch.setattr("diffusion_worker.server.serve.run", lambda config, listen, make_ranks: started.append(config) or 0)
    options = ["--max-restarts=7", "--rendezvous-address=10.0.0.1:29500", "--worker-extension=a.b:C", f"--profile-dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["diffusion-worker", "serve", f"--model={DIGITS_MODEL}", *options])
    with pytest.raises(SystemExit):
        cli.main()
    [config] = started
    assert (config.max_restarts, config.rendezvous_host, config.rendezvous_port) == (7, "10.0.0.1", 29500)
    assert (config.worker_extension, config.profile_dir) == ("a.b:C", str(tmp_path))


def test_defaults_limits_and_the_key_reach_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[WorkerConfig] = []
    monkeypatch.setattr("diffusion_worker.server.serve.run", lambda config, listen, make_ranks: started.append(config) or 0)
    options = ["--default-steps=5", "--default-guidance-scale=2.5", "--default-size=48x32", f"--api-key-file={tmp_path / 'key'}"]
    options += ["--max-steps=6", "--max-pixels=4096", "--max-images=2", "--max-prompt-characters=10"]
    monkeypatch.setattr(sys, "argv", ["diffusion-worker", "serve", f"--model={DIGITS_MODEL}", *options])
    with pytest.raises(SystemExit):
        cli.main()
    [config] = started
    assert config.defaults == RequestDefaults(steps=5, guidance_scale=2.5, width=48, height=32)
    assert config.limits == RequestLimits(max_steps=6, max_pixels=4096, max_images=2, max_prompt_chars=10)
    assert config.api_key_path == str(tmp_path / "key")
