# SPDX-License-Identifier: Apache-2.0
"""The demo's story once the operator is installed: each function is one step, shows one claim, and fails where it does not hold."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from .errors import DemoFailed
from .images import DemoImage, Request, ask, ask_and_be_refused, client_for, contact_sheet, mean_difference, same_bits, save
from .installation import ROOT
from .kubectl import Document, Kubectl, Wanted, wait_for, wait_until_gone
from .story import Step, Story
from .weights_memory import RankMemory, check_given_back, megabytes, read_state, read_weights_memory, total_resident

MANIFESTS = ROOT / "examples" / "quickstart"
ON_IDLE = ROOT / "examples" / "sleep" / "on-idle.yaml"
MODEL, ADAPTER, SECOND = "digits", "stripes", "frame"
MIXTURE = ((ADAPTER, 0.6), (SECOND, 1.0))
DEPLOYMENT, LORA, SECOND_LORA = f"diffusiondeployments/{MODEL}", f"loraadapters/{ADAPTER}", f"loraadapters/{SECOND}"
PROMPTS = ("a red digit seven", "a blue digit three", "a green digit eight")
SEED = 2

START_S, ADAPTER_S, SLEEP_S, WAKE_S, REMOVAL_S = 300.0, 60.0, 60.0, 60.0, 90.0
SERVING = Wanted("Ready", "True", ["Serving"])
SLEEPING = Wanted("Ready", "False", ["SleepRequested"])
ALL_ASLEEP = Wanted("Awake", "False", ["AllAsleep"])
WAKEABLE = Wanted("Ready", "True", ["AsleepWakeable"])
ADAPTER_READY = Wanted("Ready", "True")


@dataclass
class Demo:
    """Everything that the demo's steps need, and the images made so far by stage, such as `base`.

    `connect` takes the name of a Service; inside its block the yielded local address reaches it.
    """

    story: Story
    kubectl: Kubectl
    connect: Callable[[str], AbstractContextManager[str]]
    output: Path
    images: dict[str, list[DemoImage]] = field(default_factory=dict)

    def show_objects(self) -> None:
        self.story.say("$ kubectl get dd,lora")
        self.story.say(self.kubectl.text("get", "diffusiondeployments,loraadapters"))

    def only_pod(self) -> str:
        selector = f"diffusion-operator.dev/deployment={MODEL}"
        names = [item["metadata"]["name"] for item in self.kubectl.get("pods", "--selector", selector)["items"]]
        if len(names) != 1:
            raise DemoFailed(f"expected one pod of {DEPLOYMENT}, found {names}")
        return str(names[0])


def clear_what_an_earlier_run_left(demo: Demo, step: Step) -> None:
    demo.kubectl.text("delete", DEPLOYMENT, LORA, SECOND_LORA, "--ignore-not-found", deadline_s=REMOVAL_S)
    wait_until_gone(demo.kubectl, "pods", f"diffusion-operator.dev/deployment={MODEL}", deadline_s=REMOVAL_S)


def declare_the_model(demo: Demo, step: Step) -> None:
    demo.story.say("$ kubectl apply -f examples/quickstart/deployment.yaml")
    demo.story.say(demo.kubectl.apply(MANIFESTS / "deployment.yaml"))
    ready = wait_for(demo.kubectl, DEPLOYMENT, SERVING, deadline_s=START_S, tell=demo.story.say)
    demo.show_objects()
    step.result = f"{ready['status']['awakeReplicas']} replica of {ready['spec']['parallelism']['ranksPerReplica']} ranks serves"


def ask_the_base_model(demo: Demo, step: Step) -> None:
    demo.images["base"] = _take(demo, MODEL, "base")
    step.result = f"{len(PROMPTS)} images from model {MODEL!r}"


def apply_an_adapter(demo: Demo, step: Step) -> None:
    demo.story.say("$ kubectl apply -f examples/quickstart/adapter.yaml")
    demo.story.say(demo.kubectl.apply(MANIFESTS / "adapter.yaml"))
    wait_for(demo.kubectl, LORA, ADAPTER_READY, deadline_s=ADAPTER_S, tell=demo.story.say)
    demo.show_objects()
    step.result = f"model {ADAPTER!r} is served beside {MODEL!r}; nothing restarted"


def ask_the_adapter(demo: Demo, step: Step) -> None:
    demo.images["adapter"] = _take(demo, ADAPTER, "adapter")
    differences = [mean_difference(*pair) for pair in zip(demo.images["base"], demo.images["adapter"], strict=True)]
    if min(differences) == 0:
        raise DemoFailed(f"an image from {ADAPTER!r} is the base model's image; expected the adapter's style in each")
    step.result = f"same prompts and seeds, {sum(differences) / len(differences):.0f} of 255 levels away from the base on average"


def mix_two_adapters(demo: Demo, step: Step) -> None:
    demo.story.say("$ kubectl apply -f examples/quickstart/second-adapter.yaml")
    demo.story.say(demo.kubectl.apply(MANIFESTS / "second-adapter.yaml"))
    wait_for(demo.kubectl, SECOND_LORA, ADAPTER_READY, deadline_s=ADAPTER_S, tell=demo.story.say)
    demo.images["mixture"] = _take(demo, MODEL, "mixture", adapters=MIXTURE)
    differences = [mean_difference(*pair) for pair in zip(demo.images["adapter"], demo.images["mixture"], strict=True)]
    if min(differences) == 0:
        raise DemoFailed(f"an image from {ADAPTER!r} with {SECOND!r} is that of {ADAPTER!r} alone; expected both styles in each")
    step.result = f"{ADAPTER!r} and {SECOND!r} in each image"


def send_it_to_sleep(demo: Demo, step: Step) -> None:
    pod = demo.only_pod()
    before = read_weights_memory(demo.kubectl, pod)
    _set_sleep_policy(demo, "Asleep", ALL_ASLEEP, deadline_s=SLEEP_S)
    wait_for(demo.kubectl, DEPLOYMENT, SLEEPING, deadline_s=SLEEP_S)
    demo.show_objects()
    after = read_weights_memory(demo.kubectl, pod)
    _say_memory(demo, before, after)
    step.result = check_given_back(before, after)


def ask_a_sleeping_model(demo: Demo, step: Step) -> None:
    with demo.connect(MODEL) as url:
        refusal = ask_and_be_refused(client_for(url), Request(PROMPTS[0], SEED, MODEL))
    demo.story.say(f"{refusal.status} {refusal.code}: {refusal.message}")
    if (refusal.status, refusal.code) != (422, "Asleep"):
        raise DemoFailed(f"expected the refusal 422 Asleep, found {refusal.status} {refusal.code!r}: {refusal.message}")
    step.result = f"refused at once: {refusal.status} {refusal.code}"


def wake_it(demo: Demo, step: Step) -> None:
    pod = demo.only_pod()
    _set_sleep_policy(demo, "AlwaysAwake", SERVING, deadline_s=WAKE_S)
    wait_for(demo.kubectl, LORA, ADAPTER_READY, deadline_s=ADAPTER_S, tell=demo.story.say)
    demo.show_objects()
    if (now := demo.only_pod()) != pod:
        raise DemoFailed(f"expected the pod {pod} to wake, found {now} in its place")
    step.result = f"weights are back: {megabytes(total_resident(read_weights_memory(demo.kubectl, pod)))} in memory, same pod"


def let_it_fall_asleep(demo: Demo, step: Step) -> None:
    demo.story.say("$ kubectl apply -f examples/sleep/on-idle.yaml")
    demo.story.say(demo.kubectl.apply(ON_IDLE))
    wait_for(demo.kubectl, DEPLOYMENT, WAKEABLE, deadline_s=SLEEP_S, tell=demo.story.say)
    demo.show_objects()
    operation = _last_operation(demo, "sleep")
    step.result = f"asleep by itself: {operation['freedBytes'] / 1e6:.1f} MB freed in {operation['seconds']:.2f} s"


def wake_it_by_a_request(demo: Demo, step: Step) -> None:
    began = demo.story.clock()
    demo.images["base-after-waking"] = _take(demo, MODEL, "base-after-waking", prompts=PROMPTS[:1])
    seconds, operation = demo.story.clock() - began, _last_operation(demo, "wake")
    step.result = f"an image after {seconds:.1f} s, of which the wake took {operation['seconds']:.2f} s; nothing was refused"


def ask_again(demo: Demo, step: Step) -> None:
    """Make the base and adapter images again with the model that slept twice, and compare them bit by bit with those from before.

    Raises:
        DemoFailed: an image differs.
    """
    demo.images["base-after-waking"] += _take(demo, MODEL, "base-after-waking", prompts=PROMPTS[1:])
    demo.images["adapter-after-waking"] = _take(demo, ADAPTER, "adapter-after-waking")
    for name, model in (("base", MODEL), ("adapter", ADAPTER)):
        again = demo.images[f"{name}-after-waking"]
        differing = [prompt for prompt, old, new in zip(PROMPTS, demo.images[name], again, strict=True) if not same_bits(old, new)]
        if differing:
            raise DemoFailed(f"after waking, model {model!r} gives other bits for {differing}; expected the same images")
    step.result = f"{2 * len(PROMPTS)} of {2 * len(PROMPTS)} images are the same bit for bit"


def make_the_contact_sheet(demo: Demo, step: Step) -> None:
    titles = {
        "base": MODEL,
        "adapter": ADAPTER,
        "mixture": f"{ADAPTER} and {SECOND}",
        "base-after-waking": f"{MODEL}, after waking",
        "adapter-after-waking": f"{ADAPTER}, after waking",
    }
    path = demo.output / "contact-sheet.png"
    contact_sheet([(title, demo.images[name]) for name, title in titles.items()], PROMPTS).save(path)
    step.result = f"{len(list(demo.output.glob('*.png')))} files in {demo.output}/"


STEPS: Sequence[tuple[str, Callable[[Demo, Step], None]]] = (
    ("Remove what an earlier run left", clear_what_an_earlier_run_left),
    ("Declare a model: two ranks on the CPU", declare_the_model),
    ("Ask the model for images, with the OpenAI SDK", ask_the_base_model),
    ("Apply a LoRA adapter", apply_an_adapter),
    ("Ask the adapter for the same images", ask_the_adapter),
    ("Mix two adapters in one request", mix_two_adapters),
    ("Send the model to sleep", send_it_to_sleep),
    ("Ask the sleeping model", ask_a_sleeping_model),
    ("Wake it", wake_it),
    ("Let it fall asleep when nobody uses it", let_it_fall_asleep),
    ("Wake it by a request", wake_it_by_a_request),
    ("Ask for all the images again", ask_again),
    ("Write the contact sheet", make_the_contact_sheet),
)


def _take(
    demo: Demo, model: str, name: str, *, adapters: tuple[tuple[str, float], ...] = (), prompts: Sequence[str] = PROMPTS
) -> list[DemoImage]:
    """Make an image for each prompt, one after the other, save it as a file, and return all.

    A request alone gives the same bits every time.
    """
    taken = []
    mixed = " and ".join(f"{scale:g} of {adapter!r}" for adapter, scale in adapters)
    with demo.connect(MODEL) as url:
        client = client_for(url)
        for prompt in prompts:
            number, began = PROMPTS.index(prompt), demo.story.clock()
            image = ask(client, Request(prompt, SEED + number, model, adapters=adapters))
            path = save(demo.output, f"{name}-{number + 1}", image)
            demo.story.say(f"{prompt!r} from {mixed or repr(model)}: {demo.story.clock() - began:.1f} s -> {path}")
            taken.append(image)
    return taken


def _last_operation(demo: Demo, kind: str) -> Document:
    """Return the worker's report of its last sleep or wake, which must be of this kind and without an error."""
    found: Document = read_state(demo.kubectl, demo.only_pod())["lastOperation"] or {}
    if found.get("kind") != kind or found.get("error"):
        raise DemoFailed(f"expected a {kind} as the worker's last operation, found {found}")
    return found


def _set_sleep_policy(demo: Demo, policy: str, wanted: Wanted, *, deadline_s: float) -> None:
    change = {"spec": {"sleep": {"policy": policy}}}
    demo.story.say(f"$ kubectl patch dd {MODEL} --type merge -p '{json.dumps(change)}'")
    demo.kubectl.patch(DEPLOYMENT, change)
    wait_for(demo.kubectl, DEPLOYMENT, wanted, deadline_s=deadline_s, tell=demo.story.say)


def _say_memory(demo: Demo, before: Sequence[RankMemory], after: Sequence[RankMemory]) -> None:
    demo.story.say("memory of the weights' mapping, by /proc/PID/smaps:")
    for old, new in zip(before, after, strict=True):
        demo.story.say(f"  rank {old.rank} (pid {old.pid}): {megabytes(old.resident)} -> {megabytes(new.resident)}")
