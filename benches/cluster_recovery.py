#!/usr/bin/env python3
"""From a disturbance on a real Kubernetes to the end of the first step of the new world.

Three nodes with a rank each train an 8.43 M parameter Llama at a global batch of 12 sequences of 64
tokens (`recovery.json`). Then a node is cordoned, loses its power, or a rank is killed. One JSON line
a trial, with where the seconds went, and the medians at the end. `idle` are the seconds between the last
step of the old world and the begin of the first one of the new world, in which nothing is trained.

    cargo build --release
    NODE_GRACE=50s scripts/cluster-up.sh target/release/evenkeel
    python3 benches/cluster_recovery.py --trials 5
    tests/cluster/kit/cluster down
"""
import argparse, datetime, json, os, pathlib, shutil, signal, statistics, subprocess, tempfile, time

here = pathlib.Path(__file__).resolve().parent
p = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
p.add_argument("--trials", type=int, default=5)
p.add_argument("--only", choices=["cordon", "power", "rank"])
p.add_argument("--spares", type=int, default=0, help="processes that stand by in each pod")
p.add_argument("--state", default=os.environ.get("CLUSTER_STATE", "/tmp/evenkeel-cluster"))
a = p.parse_args()
os.environ["PATH"] = f"{os.environ.get('CLUSTER_BIN', a.state + '-bin')}:{os.environ['PATH']}"
os.environ["KUBECONFIG"] = f"{a.state}/admin.kubeconfig"

NAME = "recovery"
STAGES = ["detect", "drain", "place", "start", "restore", "step"]


def run(*words, stdin=None):
    return subprocess.run(words, input=stdin, text=True, check=True, capture_output=True).stdout


def kubectl(*words, stdin=None):
    return run("kubectl", *words, stdin=stdin)


def kit(*words):
    return run(str(here.parent / "tests/cluster/kit/cluster"), *words)


def status():
    return json.loads(kubectl("get", "tj", NAME, "-o", "json")).get("status") or {}


def until(condition, what, seconds=240):
    end = time.time() + seconds
    while time.time() < end:
        now = status()
        if condition(now):
            return now
        time.sleep(0.25)
    raise SystemExit(f"waited in vain for {what}: {json.dumps(now, indent=2)}")


def trains(nodes, generation=1):
    def holds(now):
        last = (now.get("history") or [{}])[-1]
        return now.get("nodes") == nodes and "firstStepSeconds" in last.get("stages", {}) \
            and last["jobGeneration"] >= generation
    return until(holds, f"generation {generation} on {nodes} nodes")


def node_without_controller():
    taken = kubectl("get", "pods", "-n", "evenkeel-system", "-o", "jsonpath={.items[*].spec.nodeName}")
    return next(node for node in ["node3", "node2", "node1"] if node not in taken)


def cordon():
    kubectl("cordon", "node3")
    return 2, lambda: kubectl("uncordon", "node3")


def power():
    node = node_without_controller()
    kit("lose", node)
    return 2, lambda: kit("return", node)


def rank():
    ranks = run("pgrep", "-f", f"evenkeel rank .*/{NAME}-").split()
    stood_by = lambda pid: "--stand-by" in pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    os.kill(int([pid for pid in ranks if not stood_by(pid)][-1]), signal.SIGKILL)
    return 3, lambda: None


def steps(generation):
    path = next(volume.glob(f"**/gen-{generation}/metrics.jsonl"))
    records = map(json.loads, path.read_text().splitlines())
    return [record for record in records if record.get("kind") == "step"]


def idle(generation):
    before, first = steps(generation - 1)[-1], steps(generation)[0]
    return round(first["time"] - first["seconds"] - before["time"], 2)


def trial(how):
    before = trains(3)
    steps = before["progress"]["step"]
    until(lambda now: now["progress"]["step"] >= steps + 3, "a few steps")
    generation = before["history"][-1]["jobGeneration"] + 1
    since = time.time()
    nodes, mend = how()
    try:
        change = trains(nodes, generation)["history"][-1]
    finally:
        mend()
    # The controller saw it at `startTime`; the stages' ends are seconds from there.
    start = datetime.datetime.fromisoformat(change["startTime"].replace("Z", "+00:00")).timestamp()
    stages = change["stages"]
    marks = [since - start, 0, stages.get("drainedSeconds"), stages["publishedSeconds"],
             stages["startedSeconds"], stages["restoredSeconds"], stages["firstStepSeconds"]]
    marks[2] = marks[3] if marks[2] is None else marks[2]
    seconds = dict(zip(STAGES, (round(b - a, 2) for a, b in zip(marks, marks[1:]))))
    total = round(marks[-1] - marks[0], 2)
    return dict(what=how.__name__, seconds=total, idle=idle(generation), formula=change["formula"], **seconds)


recipe = json.loads((here / "recovery.json").read_text())
recipe["spec"]["elasticity"] = {"spares": a.spares} if a.spares else {}
volume = pathlib.Path(tempfile.mkdtemp())
volume.chmod(0o777)
objects = {"apiVersion": "v1", "kind": "List", "items": [
    {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": NAME}, "spec": {
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "storageClassName": "",
        "hostPath": {"path": str(volume)}, "claimRef": {"namespace": "default", "name": NAME}}},
    {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": NAME}, "spec": {
        "accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": NAME,
        "resources": {"requests": {"storage": "1Gi"}}}},
    {"apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": NAME}, "spec": {
        "nodes": 3, "gpusPerNode": 1, "image": "evenkeel.test/evenkeel:1", "trainer": {"device": "Cpu"},
        "recipe": {"inline": json.dumps(recipe)}, "checkpoint": {"claim": NAME},
        "elasticity": {"scaleUpDelaySeconds": 2}}}]}
NODES = ["node1", "node2", "node3"]
for node in NODES:
    kit("gpus", node, "1")  # a rank on each
kubectl("create", "-f", "-", stdin=json.dumps(objects))
try:
    for how in [cordon, power, rank]:
        if a.only not in (None, how.__name__):
            continue
        trials = []
        for _ in range(a.trials):
            trials.append(trial(how))
            print(json.dumps(trials[-1]), flush=True)
        medians = {key: statistics.median(t[key] for t in trials) for key in ["seconds", "idle", *STAGES]}
        print(json.dumps(dict(what=f"{how.__name__}, median of {a.trials}", **medians)), flush=True)
finally:
    kubectl("delete", "tj", NAME, "--timeout=60s")
    kubectl("delete", "pvc,pv", NAME, "--wait=false")
    for node in NODES:
        kit("gpus", node, "2")
    shutil.rmtree(volume, ignore_errors=True)
