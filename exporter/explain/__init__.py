"""Why the exporter says what it says of a pod or a GPU: from the evidence of the very report that made the numbers. Pure.

`target` finds what is asked about, `pod` and `gpu` gather the chain of evidence as values, `pod_text` and `gpu_text` put it in sentences,
`answer` makes the JSON of `/api/v1/explain`. Nothing here decides: owners, limits, verdicts and rules are those of the report.
"""
