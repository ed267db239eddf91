"""The keys that KubeRay 1.7 and Kubernetes know, as far as ``cluster/`` uses them: any other is refused."""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
YES_OR_NO: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {"anyOf": [{"type": "string", "pattern": r"^\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?$"}, COUNT]}


def keys(required: str = "", /, **properties: Schema) -> Schema:
    """Describe a mapping with these keys and no others."""
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": properties}


def items(schema: Schema) -> Schema:
    """Describe a list that is not empty."""
    return {"type": "array", "minItems": 1, "items": schema}


def one_of(*values: str) -> Schema:
    """Describe a word out of several."""
    return {"enum": list(values)}


RESOURCES = {"cpu": QUANTITY, "memory": QUANTITY, "nvidia.com/gpu": POSITIVE}
CONTAINER = keys(
    "name image",
    name=TEXT,
    image=TEXT,
    securityContext=keys(allowPrivilegeEscalation=YES_OR_NO, capabilities=keys(drop=items(one_of("ALL")))),
    ports=items(keys("containerPort", name=TEXT, containerPort=PORT)),
    args=items(TEXT),
    env=items(keys("name value", name=TEXT, value=TEXT)),
    envFrom=items(keys(secretRef=keys("name", name=TEXT, optional=YES_OR_NO))),
    resources=keys("requests limits", requests=keys(**RESOURCES), limits=keys(**RESOURCES)),
    volumeMounts=items(keys("name mountPath", name=TEXT, mountPath=TEXT, readOnly=YES_OR_NO)),
)
POD_SPEC = keys(
    "containers",
    restartPolicy=one_of("Always", "OnFailure", "Never"),
    automountServiceAccountToken=YES_OR_NO,
    terminationGracePeriodSeconds=COUNT,
    securityContext=keys(
        runAsNonRoot=YES_OR_NO,
        runAsUser=COUNT,
        runAsGroup=COUNT,
        fsGroup=COUNT,
        seccompProfile=keys("type", type=one_of("RuntimeDefault", "Localhost", "Unconfined")),
    ),
    tolerations=items(
        keys(key=TEXT, operator=one_of("Exists", "Equal"), effect=one_of("NoSchedule", "PreferNoSchedule", "NoExecute"))
    ),
    containers=items(CONTAINER),
    volumes=items(keys("name", name=TEXT, persistentVolumeClaim=keys("claimName", claimName=TEXT, readOnly=YES_OR_NO))),
)
POD = keys("spec", metadata=keys(labels=TEXTS), spec=POD_SPEC)
SERVICE_TYPE = one_of("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
RAY_CLUSTER = keys(
    "headGroupSpec",
    rayVersion=TEXT,
    authOptions=keys(mode=one_of("disabled", "token"), secretName=TEXT),
    headGroupSpec=keys("template", serviceType=SERVICE_TYPE, rayStartParams=TEXTS, template=POD),
    workerGroupSpecs=items(
        keys(
            "groupName minReplicas maxReplicas template",
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=TEXTS,
            template=POD,
        )
    ),
)
RAY_JOB = keys(
    "entrypoint rayClusterSpec",
    entrypoint=TEXT,
    backoffLimit=COUNT,
    shutdownAfterJobFinishes=YES_OR_NO,
    ttlSecondsAfterFinished=COUNT,
    preRunningDeadlineSeconds=POSITIVE,
    activeDeadlineSeconds=POSITIVE,
    submitterPodTemplate=POD,
    rayClusterSpec=RAY_CLUSTER,
)
PODS = keys("matchLabels", matchLabels=TEXTS)
PEERS = items(keys(namespaceSelector=PODS, podSelector=PODS))
PORTS = items(keys("port protocol", port=PORT, protocol=one_of("TCP", "UDP")))
NETWORK_POLICY = keys(
    "podSelector policyTypes",
    podSelector=PODS,
    policyTypes=items(one_of("Ingress", "Egress")),
    ingress=items(keys(ports=PORTS, **{"from": PEERS})),
    egress=items(keys(to=PEERS, ports=PORTS)),
)
CLAIM = keys(
    "accessModes resources",
    accessModes=items(one_of("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")),
    resources=keys("requests", requests=keys("storage", storage=QUANTITY)),
)
POD_MONITOR = keys("selector podMetricsEndpoints", selector=PODS, podMetricsEndpoints=items(keys(port=TEXT)))

SPECS = {
    ("ray.io/v1", "RayJob"): RAY_JOB,
    ("ray.io/v1", "RayCluster"): RAY_CLUSTER,
    ("networking.k8s.io/v1", "NetworkPolicy"): NETWORK_POLICY,
    ("v1", "PersistentVolumeClaim"): CLAIM,
    ("monitoring.coreos.com/v1", "PodMonitor"): POD_MONITOR,
}


def shape(manifest: dict[str, Any]) -> Schema:
    """Return the schema for a manifest of a kind that we use."""
    kind = (manifest["apiVersion"], manifest["kind"])
    name = {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$"}  # KubeRay's limit for a RayJob
    return keys(
        "apiVersion kind metadata spec",
        apiVersion=one_of(kind[0]),
        kind=one_of(kind[1]),
        metadata=keys("name", name=name),
        spec=SPECS[kind],
    )
