"""Write MLPerf result files, to test the code that reads them."""

import json


def line(key, value, time_ms=0, **metadata):
    event = {"namespace": "", "time_ms": time_ms, "event_type": "POINT_IN_TIME"}
    event |= {"key": key, "value": value, "metadata": {"file": "f.py", "lineno": 1, **metadata}}
    return f":::MLLOG {json.dumps(event)}\n"


def write(path, batch_size, scores, status="success"):
    """Write a result file. `scores` is {samples: (FID, CLIP)}."""
    lines = [line("submission_benchmark", "stable_diffusion")]
    lines += [line("global_batch_size", batch_size), line("opt_base_learning_rate", 1e-4)]
    for samples, pair in scores.items():
        for metric, value in zip(("FID", "CLIP"), pair, strict=True):
            lines.append(line("eval_accuracy", value, metric=metric, samples_count=samples))
    if status:
        lines.append(line("run_stop", None, status=status))
    path.write_text("".join(f"0: {text}" for text in lines))
    return path
