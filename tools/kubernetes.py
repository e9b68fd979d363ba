"""launch/kubernetes, made of the demo recipe: `python -m tools.kubernetes`."""

import sys
from collections.abc import Mapping
from pathlib import Path

from bundle.launch.job import FILE_NAME, Job, from_plan
from bundle.patches import megatron_core
from bundle.planning import build_plan
from bundle.recipe import load
from bundle.targets import images
from bundle.targets.kubernetes import FORMS_BY_NAME, sanitize_recipe_name, to_yaml
from bundle.targets.kubernetes.options import KubernetesOptions
from bundle.targets.kubernetes.pod import Workload

FOLDER = "launch/kubernetes"
BASE = "kustomization.yaml"
_FILE = "demo-job"  # the ConfigMap of the job file, which kustomize makes
_CLAIM = "runs"
_HARDWARE = {"ascendjob": "a3"}  # the others: H200
_REGISTRY = f"registry.example/{images.LOCAL_BUILD_IMAGE_PREFIX}"
_ABOUT = """\
# Made by `python -m tools.kubernetes`: the demo on two nodes, by --form {form}. Its job file is not in here:
# the ConfigMap {file} holds it, which {base} makes of {name}.
"""
_KUSTOMIZATION = f"""\
# Made by `python -m tools.kubernetes`. Beside this file belongs {FILE_NAME}:
#   mcore-bundle plan demo --nodes 2 --hardware h200 --set train.global_batch_size=128 --job {FILE_NAME}
# then `kubectl apply -k .`, or an overlay with the namespace, the image and the claim of a cluster.
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
- jobset.yaml
configMapGenerator:
- name: {_FILE}
  files:
  - {FILE_NAME}
  options:
    # JobSets, and what else is no object of Kubernetes' own, are not searched for names to change.
    disableNameSuffixHash: true
    immutable: true
"""


def example(form: str) -> list[dict[str, object]]:
    """The objects of the demo in a form, but for its job file."""
    job = _job(_HARDWARE.get(form, "h200"))
    extra = FORMS_BY_NAME[form].extra
    image = f"{_REGISTRY}/{job.backend}-{extra}:TAG" if extra else images.find_matching_name(job, _REGISTRY)
    return FORMS_BY_NAME[form].render(
        Workload(job, KubernetesOptions(image, _CLAIM, form=form), sanitize_recipe_name(job), _FILE)
    )


def files() -> Mapping[str, str]:
    """Every file of the folder, by its name."""
    about = {form: _ABOUT.format(form=form, file=_FILE, base=BASE, name=FILE_NAME) for form in FORMS_BY_NAME}
    return {f"{form}.yaml": about[form] + to_yaml(example(form)) for form in FORMS_BY_NAME} | {
        BASE: _KUSTOMIZATION
    }


def _job(hardware: str) -> Job:
    batch = 256 if hardware == "a3" else 128
    recipe = load("demo", (f"train.global_batch_size={batch}",))
    plan = build_plan(
        recipe, backend="auto", hardware_name=hardware, mcore=megatron_core.DEFAULT_RELEASE, nodes=2
    )
    plan.raise_gravest_problem()
    return from_plan(plan, recipe.default_run_directory)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER)
    folder.mkdir(exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text)
        print(folder / name)
