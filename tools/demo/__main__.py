# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.demo`: from nothing to an image, a LoRA, a sleep and a wake, with comments. `make demo` calls it."""

import argparse
import sys
from pathlib import Path

from tools.devcluster.cache import locked_if_free
from tools.devcluster.errors import DevclusterError

from .cluster import Ground, address_of, prepare
from .diagnosis import diagnose
from .errors import DemoFailed
from .installation import RELEASE, ROOT, helm_install
from .kubectl import Kubectl
from .story import Story
from .walkthrough import STEPS, Demo

NAMESPACE = "diffusion-demo"
INSTALL_S = 180


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the images (default: %(default)s)")
    arguments = parser.parse_args()
    story = Story()
    with locked_if_free("demo") as alone:
        if not alone:
            story.say("error: another `make demo` runs on this machine, and both would change the same model: wait for its end")
            return 1
        try:
            ground = prepare(story)
        except DevclusterError as error:
            story.say(str(error))
            return 1
        return _tell(story, ground, arguments.output)


def _tell(story: Story, ground: Ground, output: Path) -> int:
    kubectl = Kubectl(command=ground.kubectl, namespace=NAMESPACE)
    demo = Demo(story, kubectl, lambda service: address_of(NAMESPACE, service), output)
    output.mkdir(parents=True, exist_ok=True)
    try:
        _install(story, ground)
        for title, run in STEPS:
            with story.step(title) as step:
                run(demo, step)
    except (DemoFailed, DevclusterError) as error:
        for text in diagnose(kubectl):
            story.say(text)
        story.say(f"\nFAILED: {error}")
        return 1
    finally:
        print(f"\n{story.table()}", flush=True)
    print(_farewell(output), flush=True)
    return 0


def _install(story: Story, ground: Ground) -> None:
    with story.step("Install the operator with Helm") as step:
        story.say(f"$ helm upgrade --install {RELEASE} charts/{RELEASE} --namespace {NAMESPACE} …")
        helm_install(ground.helm, ground.kubeconfig, namespace=NAMESPACE, images=ground.images, deadline_s=INSTALL_S)
        step.result = f"release {RELEASE!r} in namespace {NAMESPACE!r}"


def _farewell(output: Path) -> str:
    where = output.resolve()
    shown = where.relative_to(ROOT) if where.is_relative_to(ROOT) else where
    return f"""
The images are in {shown}/; {shown}/contact-sheet.png shows them side by side.
The cluster keeps running, with the model in it:

  .venv/bin/python -m tools.devcluster exec -- kubectl -n {NAMESPACE} get dd,lora,pods

`make demo` shows it again in a minute; `make cluster-down` removes the cluster."""


if __name__ == "__main__":
    sys.exit(main())
