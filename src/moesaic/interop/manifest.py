"""Kubernetes objects of a deployment: a LeaderWorkerSet and a Service for each kind of instance.

Source: the API leaderworkerset.x-k8s.io/v1, which gives every pod LWS_LEADER_ADDRESS and LWS_WORKER_INDEX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesaic.interop.launch import Launch, quoted
from moesaic.interop.yaml_text import dump_yaml

IMAGES = {
    "vllm": "vllm/vllm-openai:v{version}",
    "sglang": "lmsysorg/sglang:v{version}",
    "trtllm": "nvcr.io/nvidia/tensorrt-llm/release:{version}",
}
HEAD, RANK = "$LWS_LEADER_ADDRESS", "$LWS_WORKER_INDEX"
SHARED_MEMORY = "64Gi"  # guess: NCCL's buffers of eight devices; the host copy of experts needs more
FOLDER = "/etc/moesaic"


def manifest(
    pairs: list[tuple[Launch, Launch | None, int]], files: Mapping[str, str], *, image: str, port: int
) -> str:
    """The YAML of every instance. A pair is its leader's line, its workers' and devices of a node."""
    documents: list[dict[str, Any]] = []
    if files:
        documents.append(_config_map(files))
    for leader, worker, devices in pairs:
        documents.append(_worker_set(leader, worker, devices, files, image, port))
        documents.append(_service(leader.instance, port))
    return dump_yaml(*documents)


def _config_map(files: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "moesaic-files"}, "data": dict(files)
    }  # fmt: skip


def _worker_set(
    leader: Launch, worker: Launch | None, devices: int, files: Mapping[str, str], image: str, port: int
) -> dict[str, Any]:
    template: dict[str, Any] = {"size": leader.num_nodes, "restartPolicy": "RecreateGroupOnPodRestart"}
    first = {
        "metadata": {"labels": {"app": leader.instance, "role": "leader"}},
        "spec": _pod("leader", leader, devices, files, image, port),
    }
    if worker is None:  # of a group of one pod, which then has the workers' template
        template["workerTemplate"] = first
    else:
        template["leaderTemplate"] = first
        template["workerTemplate"] = {
            "metadata": {"labels": {"app": leader.instance, "role": "worker"}},
            "spec": _pod("worker", worker, devices, files, image, None),
        }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": leader.instance},
        "spec": {"replicas": leader.count, "leaderWorkerTemplate": template},
    }


def _pod(
    name: str, launch: Launch, devices: int, files: Mapping[str, str], image: str, port: int | None
) -> dict[str, Any]:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}}
    ]
    if files:
        mounts.append({"name": "files", "mountPath": FOLDER})
        volumes.append({"name": "files", "configMap": {"name": "moesaic-files"}})
    container: dict[str, Any] = {
        "name": name,
        "image": image,
        "workingDir": FOLDER,
        "command": ["/bin/sh", "-c"],
        "args": ["exec " + " ".join(map(quoted, launch.words))],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *(
                {"name": key, "value": value.replace("$POD_IP", "$(POD_IP)")}
                for key, value in launch.env.items()
            ),
        ],
        "resources": {"limits": {"nvidia.com/gpu": devices}, "requests": {"nvidia.com/gpu": devices}},
        "volumeMounts": mounts,
    }
    if not files:
        del container["workingDir"]
    if port is not None:
        container["ports"] = [{"containerPort": port}]
        container["readinessProbe"] = {
            "httpGet": {"path": "/health", "port": port}, "initialDelaySeconds": 60, "periodSeconds": 10,
        }  # fmt: skip
    return {"containers": [container], "volumes": volumes}


def _service(name: str, port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "selector": {"app": name, "role": "leader"},
            "ports": [{"name": "http", "port": port, "targetPort": port}],
        },
    }
