"""What a board can be narrowed down by, and how an expression says so.

Every variable may be All, which is `.*` and so takes series without that label too: a Prometheus of one cluster has no label `cluster`.
"""

from grafana_foundation_sdk.builders.dashboard import DatasourceVariable, QueryVariable
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableOption, VariableRefresh, VariableSort

PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${datasource}")

NODE = 'cluster=~"$cluster",node=~"$node"'
GPU = f'{NODE},gpu_uuid=~"$gpu"'
POD = f'{NODE},namespace=~"$namespace",pod=~"$pod"'
POD_ON_GPU = f'{POD},gpu_uuid=~"$gpu"'

QUERIES = {
    "cluster": ("Cluster", "label_values(fgpu_build_info, cluster)", "Label of the targets; where yours have none, leave it at All."),
    "node": ("Node", 'label_values(fgpu_build_info{cluster=~"$cluster"}, node)', "Label of the targets."),
    "namespace": ("Namespace", f"label_values(fgpu_pod_info{{{NODE}}}, namespace)", "Of the pods that have to do with GPUs."),
    "queue": ("Queue", f'label_values(fgpu_pod_info{{{NODE},namespace=~"$namespace"}}, queue)', "Queue of KAI Scheduler."),
    "pod": (
        "Pod",
        f'label_values(fgpu_pod_info{{{NODE},namespace=~"$namespace",queue=~"$queue"}}, pod)',
        "Pods that have to do with GPUs.",
    ),
    "gpu": ("GPU", f"label_values(fgpu_gpu_info{{{NODE}}}, gpu_uuid)", "UUID of a GPU or of a MIG device."),
}


def datasource() -> DatasourceVariable:
    """Answer the variable of the Prometheus that is asked."""
    return DatasourceVariable("datasource").type("prometheus").label("Prometheus").description("The Prometheus that scrapes the exporter.")


def variable(name: str) -> QueryVariable:
    """Answer one of the variables of QUERIES."""
    label, query, description = QUERIES[name]
    return (
        QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(PROMETHEUS)
        .query({"query": query, "refId": name, "qryType": 1})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.NATURAL_ASC)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )
