#!/usr/bin/env python3
"""Time that checkpoints in a bucket take from the steps of a training, paired with the same job on a local disk.

One rank trains an 8.43 M parameter Llama (`recovery.json`) on a real Kubernetes and saves 101 MB every 20 steps: once
with a claim on this machine's disk, once with only a bucket, whose server is on this machine too. The jobs alternate.
One JSON line a job with its mean seconds per step, from the first to the last step, and the ratio of the medians.

    cargo build --release
    scripts/cluster-up.sh target/release/evenkeel 1
    python3 benches/bucket_steps.py --trials 3
    tests/cluster/kit/cluster down
"""
import argparse, json, os, pathlib, shutil, statistics, subprocess, tempfile, time

here = pathlib.Path(__file__).resolve().parent
p = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
p.add_argument("--trials", type=int, default=3)
p.add_argument("--steps", type=int, default=200)
p.add_argument("--state", default=os.environ.get("CLUSTER_STATE", "/tmp/evenkeel-cluster"))
a = p.parse_args()
os.environ["PATH"] = f"{os.environ.get('CLUSTER_BIN', a.state + '-bin')}:{os.environ['PATH']}"
os.environ["KUBECONFIG"] = f"{a.state}/admin.kubeconfig"

NAME = "bucket-steps"
SECRET = {"AWS_ACCESS_KEY_ID": "evenkeel", "AWS_SECRET_ACCESS_KEY": "only-for-tests", "AWS_REGION": "eu-west-1",
          "AWS_ENDPOINT_URL": "http://10.89.0.1:9000"}


def kubectl(*words, object=None):
    text = None if object is None else json.dumps(object)
    return subprocess.run(["kubectl", *words], input=text, text=True, check=True, capture_output=True).stdout


def recipe():
    own = json.loads((here / "recovery.json").read_text())
    batch = own["spec"]["batch"]["global"]
    own["spec"]["budget"] = {"samples": a.steps * batch}
    own["spec"]["checkpoint"] = {"every_samples": 20 * batch, "keep": 2}
    return own


def seconds_per_step(place):
    steps = []
    for file in sorted(place.glob("gen-*/metrics.jsonl")):
        steps += [m for m in map(json.loads, file.read_text().splitlines()) if m["kind"] == "step"]
    return (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)


def trial(where):
    folder = pathlib.Path(a.state + "/s3" if where == "bucket" else tempfile.gettempdir()) / f"steps-{time.time_ns()}"
    folder.mkdir()
    folder.chmod(0o777)
    spec = {"recipe": {"inline": json.dumps(recipe())}, "nodes": 1, "gpusPerNode": 1, "image": "evenkeel.test/evenkeel:1",
            "trainer": {"device": "Cpu"}}
    if where == "bucket":
        spec["checkpoint"] = {"path": f"s3://{folder.name}/runs"}
        spec["trainer"] = {"device": "Cpu", "envFrom": [{"secretRef": {"name": "s3"}}]}
        kubectl("apply", "-f", "-", object={"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3"}, "stringData": SECRET})
    else:
        claim = {"storageClassName": "", "accessModes": ["ReadWriteMany"]}
        kubectl("create", "-f", "-", object={
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": folder.name}, "spec": claim | {
                "capacity": {"storage": "4Gi"}, "hostPath": {"path": str(folder)},
                "claimRef": {"namespace": "default", "name": folder.name}}})
        kubectl("create", "-f", "-", object={
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": folder.name}, "spec": claim | {
                "volumeName": folder.name, "resources": {"requests": {"storage": "4Gi"}}}})
        spec["checkpoint"] = {"claim": folder.name}
    job = {"apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": NAME}, "spec": spec}
    kubectl("create", "-f", "-", object=job)
    kubectl("wait", "--for=condition=Complete", f"tj/{NAME}", "--timeout=900s")
    place = folder / "runs" if where == "bucket" else folder
    took = seconds_per_step(next(p for p in place.iterdir() if p.name.startswith(NAME)))
    kubectl("delete", "tj", NAME, "--wait")
    kubectl("delete", "--ignore-not-found", f"pvc/{folder.name}", f"pv/{folder.name}")
    shutil.rmtree(folder)
    print(json.dumps({"checkpoints": where, "seconds_per_step": round(took, 4)}), flush=True)
    return took


found = {"disk": [], "bucket": []}
for _ in range(a.trials):
    for where in found:
        found[where].append(trial(where))
disk, bucket = (statistics.median(found[where]) for where in ["disk", "bucket"])
print(json.dumps({"bucket_over_disk": round(bucket / disk, 4), "trials": a.trials, "steps": a.steps}))
