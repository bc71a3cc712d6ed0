#!/usr/bin/env python3
"""How fast 250 jobs of 8 pods of 1 GPU get their pods on 300 nodes, and what the controller needs.

The nodes exist only in the API: KWOK plays their kubelets. First 2,000 bare pods, which nothing but
the scheduler paces; then 250 TrainingJobs, under a controller that was just started. One JSON line
each: seconds from the first create to the last pod object and to the last pod running, and for jobs
the 99th percentile of the time from a job to its last pod object, pods that were made again, and the
controller's memory. KWOK renews its nodes' leases every 10 s, so the cluster needs the grace period
that Kubernetes comes with.

    cargo build --release
    NODE_GRACE=50s scripts/cluster-up.sh target/release/evenkeel 1
    tests/cluster/kit/cluster fake 300
    python3 benches/cluster_scale.py
    tests/cluster/kit/cluster down

The jobs stay: the cluster of a second run is to be as empty as the first one's.
"""
import argparse, concurrent.futures, http.client, json, os, pathlib, re, ssl, subprocess, sys, threading, time

here = pathlib.Path(__file__).resolve().parent
p = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
p.add_argument("--jobs", type=int, default=250)
p.add_argument("--pods", type=int, default=8, help="pods of a job")
p.add_argument("--without-bare", action="store_true", help="jobs only")
p.add_argument("--state", default=os.environ.get("CLUSTER_STATE", "/tmp/evenkeel-cluster"))
a = p.parse_args()

state = pathlib.Path(a.state)
config = (state / "admin.kubeconfig").read_text()
SERVER, CA, TOKEN = (re.search(rf'{key}: "?([^",}}\s]+)', config)[1]
                     for key in ["server", "certificate-authority", "token"])
TLS = ssl.create_default_context(cafile=CA)
PODS = "/api/v1/namespaces/default/pods"
JOBS = "/apis/evenkeel.dev/v1alpha1/namespaces/default/trainingjobs"
TOLERATES = [{"key": "evenkeel.test/fake", "operator": "Exists"}]
FAKE = {"type": "fake"}
connections = threading.local()


def call(path, method="GET", body=None, own=False):
    """An answer of the API server; each thread keeps its connection, a watch has its own."""
    host = SERVER.removeprefix("https://")
    kept = getattr(connections, "kept", None)
    link = http.client.HTTPSConnection(host, context=TLS) if own or not kept else kept
    if not own:
        connections.kept = link
    link.request(method, path, body and json.dumps(body),
                 {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"})
    answer = link.getresponse()
    if answer.status >= 300:
        raise SystemExit(f"{method} {path}: {answer.status} {answer.read().decode()}")
    return answer if own else json.loads(answer.read())


class Watch:
    """When each pod was first seen, and first seen running; and those that went again."""

    def __init__(self):
        listed = call(PODS + "?limit=1")
        self.created, self.running, self.gone = {}, {}, set()
        self.version = listed["metadata"]["resourceVersion"]
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self):
        # A server ends watches when it likes, a young one soon.
        while True:
            self.take(call(f"{PODS}?watch=1&resourceVersion={self.version}", own=True))

    def take(self, lines):
        for line in lines:
            event = json.loads(line)
            if event["type"] == "ERROR":
                raise SystemExit(f"the watch ended: {line}")
            metadata, now = event["object"]["metadata"], time.time()
            name, self.version = metadata["name"], metadata["resourceVersion"]
            if event["type"] == "DELETED":
                self.gone.add(name)
                continue
            self.created.setdefault(name, now)
            if event["object"]["status"].get("phase") == "Running":
                self.running.setdefault(name, now)

    def wait(self, count, seconds=300):
        end, said = time.time() + seconds, time.time()
        while len(self.running.keys() - self.gone) < count:
            if time.time() > said + 10:
                said = time.time()
                print(f"{len(self.created)} made, {len(self.running)} running, {len(self.gone)} gone",
                      file=sys.stderr, flush=True)
            if time.time() > end:
                raise SystemExit("waited in vain")
            time.sleep(0.05)


def create(path, objects):
    """Creates all, eight at a time; returns when each was sent, by name."""
    sent = {}

    def one(item):
        sent[item["metadata"]["name"]] = time.time()
        call(path, "POST", item)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, objects))
    return sent


def remove_pods():
    while call(PODS + "?limit=1")["items"]:
        call(PODS + "?gracePeriodSeconds=0", "DELETE")
        time.sleep(1)


def controllers():
    return subprocess.run(["pgrep", "-f", "^evenkeel controller"], capture_output=True, text=True).stdout.split()


def fresh_controller():
    """Starts the controller anew, and waits until it is the only one and has been idle for a while."""
    tools = os.environ.get("CLUSTER_BIN", a.state + "-bin")
    kubectl = [f"{tools}/kubectl", "--kubeconfig", str(state / "admin.kubeconfig"), "-n", "evenkeel-system"]
    for command in [["rollout", "restart", "deployment"], ["rollout", "status", "deployment"]]:
        subprocess.run(kubectl + command, check=True, capture_output=True)
    while len(controllers()) != 1:
        time.sleep(0.5)
    time.sleep(20)


def controller():
    """Its memory in MiB, now and at most so far, and its processor seconds."""
    [pid] = controllers()
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    mib = {key: round(int(re.search(rf"{name}:\s+(\d+)", text)[1]) / 1024, 1)
           for key, name in [("mib", "VmRSS"), ("mib_at_most", "VmHWM")]}
    ticks = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return {**mib, "cpu": sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")}


def bare():
    pod = lambda n: {
        "metadata": {"name": f"bare-{n}"},
        "spec": {"tolerations": TOLERATES, "nodeSelector": FAKE, "containers": [{
            "name": "c", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}}
    count = a.jobs * a.pods
    watch = Watch()
    sent = create(PODS, [pod(n) for n in range(count)])
    watch.wait(count)
    start = min(sent.values())
    remove_pods()
    return dict(what=f"{count} bare pods", created=round(max(watch.created.values()) - start, 1),
                running=round(max(watch.running.values()) - start, 1))


def jobs():
    recipe = json.dumps({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "Recipe", "metadata": {"name": "scale"}, "spec": {
            "batch": {"global": 64, "per_device_batch_size": 4},
            "model": {"init": "random", "config": {
                "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32}},
            "data": {"sequence_length": 32, "train": [{"path": "synthetic", "synthetic": {
                "vocabulary": 64, "branching": 4, "samples": 20000}}]},
            "budget": {"samples": 20000}}})
    job = lambda n: {
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": f"scale-{n}"},
        "spec": {"nodes": a.pods, "gpusPerNode": 1, "image": "none", "trainer": {"device": "Cpu"}, "recipe": {"inline": recipe},
                 "checkpoint": {"path": "/tmp/scale"},
                 "podTemplate": {"spec": {"tolerations": TOLERATES, "nodeSelector": FAKE}}}}
    count = a.jobs * a.pods
    fresh_controller()
    idle = controller()
    watch = Watch()
    sent = create(JOBS, [job(n) for n in range(a.jobs)])
    watch.wait(count)
    start = min(sent.values())
    last = {}
    for name, at in watch.created.items():
        owner = name.rsplit("-", 2)[0]
        last[owner] = max(at, last.get(owner, 0))
    waits = sorted(last[name] - at for name, at in sent.items())
    loaded, gone = controller(), len(watch.gone)
    return dict(what=f"{a.jobs} jobs of {a.pods} pods", created=round(max(watch.created.values()) - start, 1),
                running=round(max(watch.running.values()) - start, 1),
                job_to_last_pod_p99=round(waits[int(0.99 * (len(waits) - 1))], 1),
                made_again=gone, cpu_seconds=round(loaded["cpu"] - idle["cpu"], 1),
                idle_mib=idle["mib"], loaded_mib=loaded["mib"], at_most_mib=loaded["mib_at_most"])


for measured in [jobs] if a.without_bare else [bare, jobs]:
    print(json.dumps(measured()), flush=True)
