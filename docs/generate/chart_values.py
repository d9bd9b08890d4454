"""Values of the chart `helm/shoal`: every one with its type, its limits, its default and what it does.

The models are the only source: `chart.py` beside this file writes values.schema.json, values.yaml and docs/chart.md
from them. What two values demand of each other is in the chart's `_checks.tpl`, each as one sentence. A number or a
name is never optional here (empty stands for "not given"), because helm's sentence for a wrong value is clear only
where one type is allowed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$"
Quantity = Annotated[str, Field(pattern=QUANTITY)]
Amount = Annotated[str, WithJsonSchema({"type": ["string", "number"], "pattern": QUANTITY, "minimum": 0})]
"""A quantity, or a bare number, as most people write cores."""
NAME = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"
Name = Annotated[str, Field(pattern=NAME, max_length=253)]


def name_or_object(key: str, **properties: object) -> WithJsonSchema:
    """Says that a value is a name, or an object that has it under `key`, as charts have both. `properties`: schemas of
    what else it may have.
    """
    name: dict[str, Any] = {"pattern": NAME, "maxLength": 253}
    return WithJsonSchema({
        "type": ["string", "object"], **name,
        "properties": {key: {"type": "string", **name}, **properties},
        "required": [key], "additionalProperties": False,
    })  # fmt: skip


PullSecret = Annotated[Any, name_or_object("name")]
Host = Annotated[Any, name_or_object("host", paths={"type": "array", "items": {"type": "object"}})]
Duration = Annotated[str, Field(pattern=r"^[0-9]+(s|m|h)$")]
Texts = dict[str, str]
Free = dict[str, Any]
"""A piece of the Kubernetes API that the chart hands on as it is; the API server says what is wrong with it."""


class Values(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Image(Values):
    repository: str = ""
    """Registry and repository. One without a default must be named."""
    tag: str = ""
    """Tag or `sha256:…` digest. Default: the chart's version of the application."""
    pullPolicy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """When the image is pulled."""


class Resources(Values):
    requests: dict[str, Amount]
    """What is reserved, by resource. What is not named keeps its default; `null` takes it away."""
    limits: dict[str, Amount]
    """What is allowed, by resource, likewise."""


class Placement(Values):
    """Where pods of one kind run."""

    nodeSelector: Texts = {}
    """Labels that a node must have."""
    tolerations: list[Free] = []
    """Taints that are tolerated."""
    affinity: Free = {}
    """Affinity."""
    topologySpreadConstraints: list[Free] = []
    """How pods are spread. Default, where no affinity is given: over nodes and zones where possible."""
    priorityClassName: Name = ""
    """Priority class."""
    podAnnotations: Texts = {}
    """Annotations of the pods."""
    podLabels: Texts = {}
    """Labels of the pods, besides the chart's own."""


class Controller(Placement):
    replicas: Annotated[int, Field(ge=1, le=9)] = 2
    """Number of controllers: one leads, the others take over. 1 with `store: embedded`."""
    launchers: Annotated[str, Field(pattern=r"^(kubernetes|none)(,(kubernetes|none))?$")] = "kubernetes,none"
    """Launchers that jobs may use. `local` is not among them: it would run users' commands as the controller."""
    logLevel: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    forgetAfterSeconds: Annotated[int, Field(ge=60)] = 604_800
    """Time after which a finished job is forgotten."""
    drainTaints: list[Annotated[str, Field(pattern=r"^[^\s,]+$", max_length=317)]] = []
    """Taints of nodes that are to go, besides those of autoscalers and clouds, which Shoal knows."""
    listenHost: Literal["0.0.0.0", "::"] = "0.0.0.0"
    """Host to listen on; `::` in a cluster of IPv6 only."""
    env: Texts = {}
    """Further environment variables, such as proxies. Settings of Shoal are values of the chart instead."""
    extraEnvFrom: list[Free] = []
    """Secrets and ConfigMaps whose keys become environment variables, as the Kubernetes API has them (`envFrom`)."""
    extraVolumes: list[Free] = []
    """Further volumes of the pods, as the Kubernetes API has them."""
    extraVolumeMounts: list[Free] = []
    """Where the controllers see them."""
    resources: Resources = Resources(requests={"cpu": "250m", "memory": "384Mi"}, limits={"cpu": "2", "memory": "2Gi"})
    """Resources of a controller."""
    podDisruptionBudget: bool = True
    """Whether at most one controller at a time may be evicted. Without effect with `store: embedded`."""
    terminationGracePeriodSeconds: Annotated[int, Field(ge=20, le=600)] = 45
    """Time in which a controller must end."""


class Volume(Values):
    size: Quantity
    """Size of the volume."""
    storageClass: Name = ""
    """Storage class. Default: the cluster's."""


class External(Values):
    endpoints: list[Annotated[str, Field(pattern=r"^\S+:[0-9]+$")]] = []
    """`HOST:PORT` of each member of an etcd that is there already. Empty: the chart brings one."""
    prefix: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._-]+)+$", max_length=128)] = "/shoal"
    """Prefix of all keys, of the chart's etcd too."""
    user: Annotated[str, Field(pattern=r"^[^:@/,]*$")] = ""
    """User of etcd."""
    passwordSecret: Name = ""
    """Secret with that user's password in the key `password`."""
    tlsSecret: Name = ""
    """Secret with the authority of etcd's certificates in the key `ca.crt`. Empty: no TLS to etcd."""
    clientCertificate: bool = False
    """Whether etcd asks for a certificate: `tls.crt` and `tls.key` of the same secret."""


class Etcd(Placement):
    external: External = External()
    """An etcd of your own."""
    image: Image = Image(repository="gcr.io/etcd-development/etcd", tag="v3.6.15")
    """Image of etcd."""
    replicas: Literal[1, 3, 5] = 3
    """Members."""
    volume: Volume = Volume(size="8Gi")
    """Volume of each member."""
    quotaBytes: Annotated[int, Field(ge=268_435_456, le=8_589_934_592)] = 2_147_483_648
    """Size at which etcd stops taking writes."""
    resources: Resources = Resources(requests={"cpu": "250m", "memory": "512Mi"}, limits={"cpu": "2", "memory": "4Gi"})
    """Resources of a member."""


class Backup(Values):
    enabled: bool = False
    """Whether a CronJob backs up the store, with `store: etcd` (docs/operations.md, "Backups")."""
    schedule: Annotated[str, Field(min_length=9, max_length=100)] = "17 * * * *"
    """When, as of cron."""
    keep: Annotated[int, Field(ge=1, le=10_000)] = 48
    """How many backups are kept."""
    tokens: bool = False
    """Whether hashes of named tokens are among them."""
    existingClaim: Name = ""
    """Claim of the volume that they are written to. Empty: the chart makes one, kept by `helm uninstall`."""
    volume: Volume = Volume(size="5Gi")
    """The volume that the chart makes."""


class Defaults(Values):
    """What a job's own section `kubernetes` replaces, key by key."""

    image: Annotated[str, Field(max_length=1000)] = ""
    """Image of the workers of jobs that name none."""
    imagePullSecrets: list[PullSecret] = []
    """Secrets that it is pulled with: names, or `{name: NAME}`."""
    nodeSelector: Texts = {}
    """Labels that a worker's node must have."""
    tolerations: list[Free] = []
    """Taints of a worker's node that are tolerated."""
    volumes: list[Free] = []
    """Volumes of a worker's pod, as the Kubernetes API has them."""
    volumeMounts: list[Free] = []
    """Where workers see them."""
    checkpointRoot: Annotated[str, Field(max_length=1000)] = ""
    """Folder or URL below which a job saves, in a folder of its name, whose config names no path."""


class Token(Values):
    existingSecret: Name = ""
    """Secret with the root token in the key `token`. Empty: made once, kept over upgrades and by `helm uninstall`."""


class Issuer(Values):
    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    """Kind of the issuer."""
    name: Name = ""
    """Name of the issuer, which must be one with an authority of its own (`ca.crt` in its secrets)."""


class Tls(Values):
    source: Literal["none", "secret", "generated", "certManager"] = "none"
    """Where certificates come from: `none` (no TLS), `secret` (given), `generated` (an authority and certificates
    of ten years, made once and kept over upgrades), `certManager`. With the last two the chart's etcd speaks TLS."""
    secret: Name = ""
    """With `secret`: the controllers' certificate, `tls.crt`, `tls.key` and `ca.crt`. The notes say its names."""
    workers: bool = False
    """Whether workers need a certificate, too (mutual TLS). Mount the secret `RELEASE-worker-tls` in jobs' pods."""
    issuer: Issuer = Issuer()
    """With `certManager`: who signs."""


class Service(Values):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Type of the service of REST."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 7070
    """Port of the service of REST."""
    annotations: Texts = {}
    """Annotations of the service of REST."""


class Ingress(Values):
    enabled: bool = False
    """Whether REST is reached from outside by an Ingress."""
    className: Name = ""
    """Ingress class. Default: the cluster's."""
    hosts: list[Host] = []
    """Hosts: names, or as other charts have them `{host: NAME, paths: [{path: /, pathType: Prefix}]}`."""
    tls: list[Free] = []
    """Certificates of hosts, as the Kubernetes API has them: `{secretName: NAME, hosts: [NAME]}`."""
    annotations: Texts = {}
    """Annotations, such as the protocol towards a REST that speaks HTTPS."""


class Rbac(Values):
    create: bool = True
    """Whether the chart makes roles and their bindings; otherwise it makes none at all."""
    nodes: bool = True
    """Whether the controllers may read nodes. Without it they do not see taints and cordons: a preemption is noticed
    when the pod is told to end."""
    volcano: bool = False
    """Whether the controllers may make PodGroups of Volcano, which jobs with `kubernetes.gang: volcano` need."""


class ServiceAccount(Values):
    create: bool = True
    """Whether the chart makes the service account."""
    name: Name = ""
    """Its name. Default: the release's name; `default` where it is not made."""
    annotations: Texts = {}
    """Annotations of the service account."""


class NetworkPolicies(Values):
    enabled: bool = True
    """Whether connections to controllers, etcd and workers are limited to those that Shoal needs (docs/network.md)."""
    restFrom: list[Free] = []
    """Peers (`podSelector`, `namespaceSelector`, `ipBlock`) that may reach REST. Empty: everybody."""
    metricsFrom: list[Free] = []
    """Peers that may reach the metrics of etcd, such as Prometheus. `/metrics` of controllers is REST's port."""


class ServiceMonitor(Values):
    enabled: bool = False
    """Whether ServiceMonitors (prometheus-operator) of the controllers and of the chart's etcd are made."""
    interval: Duration = "15s"
    """Time between two scrapes."""
    labels: Texts = {}
    """Labels by which your Prometheus selects it."""
    tokenSecret: Name = ""
    """Secret with a token of role `view` in the key `token`. Empty: a job makes the token once after the install."""


class Labelled(Values):
    enabled: bool = False
    """Whether it is made."""
    labels: Texts = {}
    """Labels by which it is selected."""


class Dashboards(Labelled):
    labels: Texts = {"grafana_dashboard": "1"}
    """Labels by which Grafana's sidecar finds the ConfigMaps."""
    annotations: Texts = {}
    """Annotations, such as the folder in Grafana."""


class Monitoring(Values):
    serviceMonitor: ServiceMonitor = ServiceMonitor()
    """Scraping."""
    alerts: Labelled = Labelled()
    """The alerts of docs/operations.md as a PrometheusRule."""
    dashboards: Dashboards = Dashboards()
    """Grafana's dashboards as ConfigMaps."""


class Crd(Values):
    install: bool = True
    """Whether the chart brings elasticjobs.shoal.dev, from which the controllers make jobs in their namespace. The
    definition is kept by `helm uninstall`; one release of a cluster brings it."""
    uninstallWarning: bool = True
    """Whether `helm uninstall` warns of ElasticJobs that are left. It takes a ValidatingAdmissionPolicy, an object of
    the whole cluster."""


class Test(Values):
    lanes: Annotated[int, Field(ge=2, le=64)] = 4
    """Lanes of the job of `helm test`."""
    timeoutSeconds: Annotated[int, Field(ge=30, le=3600)] = 600
    """Time that each of its two runs may take."""


class ChartValues(Values):
    image: Image = Image()
    """Image of the controllers (deploy/controller.Dockerfile). None is published, so name yours."""
    workerImage: Image = Image()
    """Image of the job that `helm test` runs (deploy/worker.Dockerfile). None is published, so name yours."""
    imagePullSecrets: list[PullSecret] = []
    """Secrets for the registry: names, or `{name: NAME}`. Those of `global.imagePullSecrets` are added."""
    nameOverride: Name = ""
    """Name of the chart in labels."""
    fullnameOverride: Annotated[str, Field(pattern=r"^([a-z]([-a-z0-9]*[a-z0-9])?)?$", max_length=40)] = ""
    """Name of everything that is made. Default: the release's name, with `-shoal` where it has not that in it."""
    clusterDomain: Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")] = "cluster.local"
    """Domain of the cluster's DNS."""
    controller: Controller = Controller()
    """The controllers."""
    store: Literal["etcd", "embedded"] = "etcd"
    """Where the controllers keep their state: `etcd`, or `embedded`: one controller with a volume."""
    embedded: Volume = Volume(size="10Gi")
    """Volume of `store: embedded`."""
    etcd: Etcd = Etcd()
    """etcd, with `store: etcd`."""
    upgradePolicy: bool = True
    """Whether what an upgrade cannot change is refused in one sentence. It takes a ValidatingAdmissionPolicy, an object
    of the whole cluster. With `false` helm refuses it itself, and a ConfigMap that cannot be changed stops Argo CD."""
    defaults: Defaults = Defaults()
    """Defaults of jobs, for all that are made from then on."""
    backup: Backup = Backup()
    """Backups of the store."""
    token: Token = Token()
    """The root token, which opens everything."""
    tls: Tls = Tls()
    """Certificates of REST, of the workers' port and of the chart's etcd."""
    service: Service = Service()
    """Service of REST."""
    ingress: Ingress = Ingress()
    """Way in from outside."""
    rbac: Rbac = Rbac()
    """Rights of the controllers."""
    serviceAccount: ServiceAccount = ServiceAccount()
    """The controllers' service account."""
    networkPolicy: NetworkPolicies = NetworkPolicies()
    """Who may connect to whom."""
    monitoring: Monitoring = Monitoring()
    """Prometheus and Grafana."""
    crd: Crd = Crd()
    """The resource ElasticJob."""
    test: Test = Test()
    """What `helm test` does."""
