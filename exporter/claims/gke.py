"""A share of a GPU by GKE's device plugin: an id `nvidia<minor>/vgpu<n>`, or `nvidia<minor>/gi<gi>/vgpu<n>` of a MIG device.

The node label `cloud.google.com/gke-gpu-sharing-strategy` says `time-sharing` or `mps`; the claims are those of `time_slicing` and `mps`,
except that the cap of an MPS client process is the sum of the shares that its container holds. The number of shares is what the kubelet
lists, else the label `cloud.google.com/gke-max-shared-clients-per-gpu`. Plain ids are the claims of `whole_gpu` and `mig`.
https://cloud.google.com/kubernetes-engine/docs/concepts/timesharing-gpus
"""

from exporter.claims.claim import NOT_MINE, Answer, Node, Resolver, System
from exporter.claims.device_ids import DeviceIds, parse_shares_label
from exporter.claims.mps import resolve_clients
from exporter.claims.time_slicing import resolve_shares
from exporter.snapshot import Pod

STRATEGY_LABEL = "cloud.google.com/gke-gpu-sharing-strategy"
CLIENTS_LABEL = "cloud.google.com/gke-max-shared-clients-per-gpu"


def resolver(node: Node) -> Resolver:
    """Answer the function that says what a pod holds of GPUs that GKE shares."""
    ids = DeviceIds(node)
    is_mps = node.labels.get(STRATEGY_LABEL) == "mps"
    labelled = parse_shares_label(node, CLIENTS_LABEL)

    def resolve(pod: Pod) -> Answer:
        shares = [held for held in ids.held(pod) if held.shares and held.is_gke]
        if not shares:
            return NOT_MINE
        numbered = [(held, ids.shares_listed(held.gpu) or labelled) for held in shares]
        if is_mps:
            # Its plugin sets the limits in each container's environment, by the shares that it holds.
            return resolve_clients("gke", pod, numbered, cap_grows=True)
        return resolve_shares("gke", node, numbered)

    return resolve


SYSTEM = System(name="gke", resolver=resolver)
