"""A format that says what the model is, and verifies nothing."""


def export(job):
    graphs = ", ".join(graph.name for graph in job.model.spec.graphs)
    text = f"{job.options.greeting}, {job.model.spec.name}: {graphs} in {job.model.dtype}\n"
    (job.folder / "api1.txt").write_text(text, encoding="utf-8")
    return {"verified": False, "reason": "a text computes nothing"}
