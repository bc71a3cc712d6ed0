#!/usr/bin/env python3
"""Two tenants on one cluster: one attacks the controller in every way known, the other trains.

The trainer of the second tenant waits for its device in each step, as a GPU's does, so the rate of its steps
shows what the attacks do to the job and not what they take from this machine's processors. A second job of
it trains on the processors. Quiet and hostile windows alternate; one JSON line for each cycle has the rate
of steps in both, and the last line their ratios over the whole run. It fails when a job of the second tenant
leaves its first generation, when the ratio is below 0.95, or when a pod of the controller restarts or is replaced.

The attacker is a user who may manage TrainingJobs in one namespace and nothing else; the one who forges may also write
their status. It fails when the API server accepts an attack that it must refuse, or never accepts one that must reach
the controller.

    cargo build --release
    GPUS=8 scripts/cluster-up.sh target/release/evenkeel
    python3 benches/tenants.py --minutes 60
    tests/cluster/kit/cluster down

An hour is too long for each change: run it before a release.
"""
import argparse, json, os, pathlib, random, re, shutil, subprocess, sys, tempfile, threading, time

here = pathlib.Path(__file__).resolve().parent
p = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
p.add_argument("--minutes", type=float, default=60)
p.add_argument("--quiet", type=float, default=60, help="seconds of a quiet window")
p.add_argument("--hostile", type=float, default=240, help="seconds of a hostile window")
p.add_argument("--seed", type=int, default=1)
p.add_argument("--state", default=os.environ.get("CLUSTER_STATE", "/tmp/evenkeel-cluster"))
p.add_argument("--bin", default=os.environ.get("CLUSTER_BIN", "/tmp/evenkeel-cluster-bin"))
a = p.parse_args()

random.seed(a.seed)
state = pathlib.Path(a.state)
env = os.environ | {"KUBECONFIG": str(state / "admin.kubeconfig"), "PATH": f"{a.bin}:{os.environ['PATH']}"}
KIT = here.parent / "tests/cluster/kit"
IMAGE, BUSYBOX, HOSTILE = (f"evenkeel.test/{name}:1" for name in ["evenkeel", "busybox", "hostile"])
MODES = ["endless", "drip", "redirect", "headers", "busy", "deep", "lies", "continue", "stranger"]
STEP = 0.25  # seconds that a step of the paced trainer waits for its device


def run(*command, stdin=None, check=True):
    done = subprocess.run(command, input=stdin, env=env, text=True, capture_output=True)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
    return done.stdout


def tried(user, *arguments, stdin=None):
    """What an API server answers to a user: nothing, or why it refuses."""
    command = ["kubectl", f"--as={user}", *arguments]
    done = subprocess.run(command, input=stdin, env=env, text=True, capture_output=True)
    return done.stdout + done.stderr if done.returncode else None


def kubectl(*arguments, stdin=None, check=True):
    return run("kubectl", *arguments, stdin=stdin, check=check)


def apply(*objects):
    items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(items))


def job(namespace, name, recipe, **spec):
    base = {"nodes": 2, "gpusPerNode": 1, "image": IMAGE, "checkpoint": {"path": "/tmp"},
            "trainer": {"device": "Cpu"},
            "recipe": {"inline": recipe if isinstance(recipe, str) else json.dumps(recipe)}}
    return {"apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": namespace}, "spec": base | spec}


def recipe(batch, budget=10 ** 8, **more):
    samples = max(20_000, 2 * batch)
    return {"apiVersion": "evenkeel.dev/v1alpha1", "kind": "Recipe", "metadata": {"name": "r"}, "spec": {
        "batch": {"global": batch}, "model": {"init": "random", "config": {
            "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32,
            "tie_word_embeddings": True}},
        "data": {"sequence_length": 32, "train": [{"path": "synthetic", "synthetic": {
            "vocabulary": 64, "branching": 4, "samples": samples}}]},
        "budget": {"samples": max(budget, 2 * batch)},
        "learning_rate": {"peak": 1e-3, "shape": "constant"}} | more}


# The tenant that trains.

volume = pathlib.Path(tempfile.mkdtemp())
volume.chmod(0o777)


def begin_training():
    apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "victim"}},
          {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "hostile"}},
          {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "victim"}, "spec": {
              "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "storageClassName": "",
              "hostPath": {"path": str(volume)}, "claimRef": {"namespace": "victim", "name": "victim"}}},
          {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {
              "name": "victim", "namespace": "victim"}, "spec": {
              "accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": "victim",
              "resources": {"requests": {"storage": "1Gi"}}}})
    steps = f'while :; do echo >> "$EVENKEEL_RUN_DIR/steps-$RANK"; /bin/busybox sleep {STEP}; done'
    claim = {"claim": "victim"}
    apply(job("victim", "paced", recipe(96), nodes=3, gpusPerNode=2, image=BUSYBOX, checkpoint=claim,
              trainer={"command": ["/bin/busybox", "sh", "-c", steps]}),
          job("victim", "trained", recipe(96), nodes=3, gpusPerNode=1, checkpoint=claim))
    for name in ["paced", "trained"]:
        kubectl("-n", "victim", "wait", "tj", name, "--for=condition=Running", "--timeout=180s")


def steps():
    """Steps of each job so far."""
    files = volume.glob("paced-*/steps-*")
    paced = [path.stat().st_size for path in files]
    status = json.loads(kubectl("-n", "victim", "get", "tj", "trained", "-o", "json"))["status"]
    return {"paced": sum(paced) / max(len(paced), 1), "trained": status.get("progress", {}).get("step", 0)}


restarts = {}  # of the controller's pods before the run, by uid


def faults():
    """What must not happen to the second tenant or to the controller."""
    found = []
    for item in json.loads(kubectl("-n", "victim", "get", "tj", "-o", "json"))["items"]:
        status, name = item["status"], item["metadata"]["name"]
        generation = status.get("jobGeneration", {}).get("record", {}).get("number")
        if status["phase"] != "Running" or generation != 1:
            found.append(f"{name}: {status['phase']}, generation {generation}: {status.get('message')}")
    pods = json.loads(kubectl("-n", "evenkeel-system", "get", "pods", "-o", "json"))["items"]
    pods = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    restarted = lambda pod: sum(one["restartCount"] for one in pod["status"].get("containerStatuses", []))
    now = {pod["metadata"]["uid"]: restarted(pod) for pod in pods}
    restarts.update({} if restarts else now)
    if now != restarts:
        found.append(f"pods of the controller and their restarts: {now}, not {restarts}")
    return found


def controller_memory():
    """Largest resident memory of the controller so far, MiB."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"evenkeel") and words[1] == b"controller":
                return int(re.search(r"VmHWM:\s+(\d+)", (process / "status").read_text())[1]) // 1024
        except (OSError, IndexError, TypeError):
            pass


def health_seconds():
    """Time that /healthz takes through the API server."""
    pods = json.loads(kubectl("-n", "evenkeel-system", "get", "pods", "-o", "json"))["items"]
    start = time.time()
    kubectl("get", "--raw", f"/api/v1/namespaces/evenkeel-system/pods/{pods[0]['metadata']['name']}:8080/proxy/healthz")
    return round(time.time() - start, 2)


# The tenant that attacks.

TENANT, FORGER = "tenant", "forger"


def grant():
    """Lets the users manage TrainingJobs in their namespace, and one of them write the status."""
    for user, resources in [(TENANT, ["trainingjobs"]), (FORGER, ["trainingjobs", "trainingjobs/status"])]:
        metadata = {"name": user, "namespace": "hostile"}
        apply({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": [
                  {"apiGroups": ["evenkeel.dev"], "resources": resources, "verbs": ["*"]}]},
              {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": metadata,
               "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": user},
               "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}]})
        for verb, what, namespace in [("create", "pods", "hostile"), ("get", "secrets", "hostile"),
                                      ("get", "trainingjobs.evenkeel.dev", "victim")]:
            if tried(user, "auth", "can-i", verb, what, "-n", namespace) is None:
                raise SystemExit(f"{user} may {verb} {what} in {namespace}")


# How often the API server has accepted and refused each attack, and the last reason.
answers = {}


def count(attack, refusal):
    """Counts an answer. A job that does not exist at the moment has neither."""
    if refusal is None or "NotFound" not in refusal:
        known = answers.setdefault(attack, {"accepted": 0, "refused": 0, "reason": ""})
        known["accepted" if refusal is None else "refused"] += 1
        known["reason"] = refusal.strip()[-300:] if refusal else known["reason"]


def unintended():
    """Attacks that were answered otherwise than intended."""
    for attack, answer in answers.items():
        refused = attack.startswith("priority-") or attack == "agent-host"
        if refused and answer["accepted"]:
            yield f"{attack} was accepted {answer['accepted']} times"
        elif not refused and not answer["accepted"]:
            yield f"{attack} never reached the controller: {answer['reason']}"
    # A status that its schema excludes is refused; the others are for the controller.
    if not answers.get("forged status", {}).get("refused"):
        yield "no forged status was refused by the schema"

def hostile(name, what, **spec):
    return job("hostile", name, what, **({"elasticity": {"placementSeconds": 3600}} | spec))


def overlay(**spec):
    return {"spec": spec}


def reservations():
    """Pods that nothing places, on every node that the other tenant uses."""
    asks = {"capacity": "Request", "placementSeconds": 3600}
    yield hostile("unknown-scheduler", recipe(1 << 10), gpusPerNode=8, elasticity=asks,
                  podTemplate=overlay(schedulerName="absent"))
    yield hostile("autoscaler", recipe(1 << 10), nodes=4, gpusPerNode=2, elasticity=asks,
                  podTemplate=overlay(nodeSelector={"pool": "absent"}))
    yield hostile("bound", recipe(1 << 10), gpusPerNode=8, elasticity=asks,
                  podTemplate=overlay(nodeName="node1"))
    yield hostile("tolerant", recipe(1 << 10), nodes=16, gpusPerNode=4, elasticity=asks,
                  podTemplate=overlay(schedulerName="absent", tolerations=[{"operator": "Exists"}]))


def agents():
    """Pods that answer as no agent does."""
    for mode in MODES:
        container = {"name": "trainer", "image": HOSTILE, "command": ["/bin/hostile", mode], "args": []}
        yield hostile(f"agent-{mode}", recipe(1 << 10), nodes=3, podTemplate=overlay(containers=[container]))
    yield hostile("agent-host", recipe(1 << 10), nodes=2, podTemplate=overlay(hostNetwork=True, containers=[
        {"name": "trainer", "image": HOSTILE, "command": ["/bin/hostile", "lies"], "args": []}]))


def bombs(round):
    """Plans that cost much; each round has new batches."""
    batches = [1 << 32, 4_294_967_291, 3_491_888_400, 4_294_967_279]
    for n in range(24):
        batch = batches[n % 4] - (0 if n % 4 == 0 else 2 * round)
        elasticity = {"minNodes": 1024, "remainder": "Uneven" if n % 2 else "Exact"}
        yield hostile(f"bomb-{n}", recipe(batch), nodes=1024, elasticity=elasticity)


def names():
    """Jobs named like objects of others, which an administrator has made."""
    metadata = {"name": "taken", "namespace": "hostile"}
    apply({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {
              "clusterIP": "None", "selector": {"app": "taken"}}},
          {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": {
              "podSelector": {"matchLabels": {"app": "taken"}}}})
    yield hostile("taken", recipe(1 << 10))


def recipes():
    """Recipes that read what is not theirs, or that grow while they are read."""
    yield hostile("environment", "${oc.env:HTTP_PROXY}${oc.env:KUBERNETES_SERVICE_HOST}")
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 12))
    yield hostile("aliases", laughs)
    yield hostile("deep", "[" * 200_000)
    yield hostile("interpolation", "a: xxxxxxxxxxxxxxxx\n" + "".join(
        f"b{n}: ${{{'a' if n == 0 else f'b{n - 1}'}}}${{{'a' if n == 0 else f'b{n - 1}'}}}\n" for n in range(40)))


def priorities():
    """Jobs that would preempt the controller and the other tenant. The admission policy refuses them."""
    resources = {"requests": {"cpu": "64"}}
    containers = [{"name": "trainer", "resources": resources}]
    for name, priority in [("node", {"priorityClassName": "system-node-critical"}),
                           ("cluster", {"priorityClassName": "system-cluster-critical"}),
                           ("number", {"priority": 2_000_001_000})]:
        yield hostile(f"priority-{name}", recipe(1 << 10), nodes=16,
                      elasticity={"capacity": "Request", "placementSeconds": 3600},
                      podTemplate=overlay(containers=containers, **priority))


FORGED = [-1, 0, 1, 2 ** 31, 2 ** 32 - 1, 2 ** 53, 10 ** 18, -10 ** 18, "", "x" * 10_000, "2" * 400, None, [], {}, True,
          1e308, ["x"] * 10_000, "9999-12-31T23:59:59.999999Z", "0001-01-01T00:00:00.000000Z"]


def forged(value):
    """The value with another one somewhere in it."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        return value | {key: forged(value[key])}
    if isinstance(value, list) and value and random.random() < 0.9:
        index = random.randrange(len(value))
        return [forged(item) if at == index else item for at, item in enumerate(value)]
    return random.choice(FORGED)


def forge_statuses():
    """Writes statuses of another job, each with one to three other values in it, over those of the tenant's own jobs.
    Two are the ones that once ended the controller."""
    if not random.randrange(3):
        manage(FORGER, hostile("forged", recipe(96), nodes=2))
    template = json.loads(kubectl("-n", "victim", "get", "tj", "trained", "-o", "json"))["status"]
    record = template["jobGeneration"]["record"]
    huge = [member | {"ranks": 2 ** 32 - 1} for member in record["members"]]
    zeros = {key: 0 if isinstance(value, int) else value for key, value in record["plan"].items()}
    known = [template | {"jobGeneration": template["jobGeneration"] | {"record": record | changed}}
             for changed in [{"members": huge}, {"plan": zeros}]]
    other = template
    for _ in range(random.randint(1, 3)):
        other = forged(other)
    for name in ["forged", "bound", "agent-lies"]:
        status = random.choice([*known, other, other])
        # The schema admits any record.
        attack = "known status" if status in known else "forged status"
        # Not an argument, which has a limit below the largest status.
        count(attack, tried(FORGER, "-n", "hostile", "patch", "tj", name, "--subresource=status", "--type=merge",
                            "--patch-file=/dev/stdin", stdin=json.dumps({"status": status})))


def manage(user, job):
    """Applies a job as a user. One that was planned keeps its recipe, so a later one of its name may be refused."""
    count(job["metadata"]["name"], tried(user, "apply", "--server-side", "--force-conflicts", "-f", "-",
                                         stdin=json.dumps(job)))


def attack(until):
    round = 0
    while time.time() < until:
        round += 1
        wave = [*reservations(), *agents(), *bombs(round), *names(), *recipes(), *priorities()]
        random.shuffle(wave)
        for item in wave:
            if time.time() > until:
                break
            manage(TENANT, item)
            if not random.randrange(4):
                forge_statuses()
        if random.random() < 0.5:
            tried(TENANT, "-n", "hostile", "delete", "tj", *random.sample(
                ["unknown-scheduler", "bound", "agent-endless", "agent-lies", "tolerant"], 2),
                "--ignore-not-found", "--wait=false")
        time.sleep(min(10, max(0, until - time.time())))


def calm():
    kubectl("-n", "hostile", "delete", "tj,svc,networkpolicy", "--all", "--wait=false", check=False)
    kubectl("-n", "hostile", "delete", "pods", "--all", "--force", "--grace-period=0", check=False)
    until = time.time() + 60
    while kubectl("-n", "hostile", "get", "pods,tj", "-o", "name").strip() and time.time() < until:
        time.sleep(1)


def measured(seconds, work=None):
    """Steps a second of both jobs during a window."""
    start, before = time.time(), steps()
    thread = threading.Thread(target=work or time.sleep, args=[start + seconds if work else seconds])
    thread.start()
    health, found = [], []
    while thread.is_alive():
        found += faults()
        health.append(health_seconds())
        thread.join(5)
    took, after = time.time() - start, steps()
    rates = {name: (after[name] - before[name]) / took for name in after}
    return rates, took, max(health), found


build = ["go", "build", "-o", str(state / "hostile"), str(here / "hostile_agent.go")]
subprocess.run(build, check=True, env=os.environ | {"CGO_ENABLED": "0"})
run(KIT / "image", state / "image.tar", HOSTILE, '["/bin/hostile"]', f"{state / 'hostile'}:bin/hostile")
run(KIT / "cluster", "load", state / "image.tar")
total = {"quiet": {}, "hostile": {}, "seconds": {"quiet": 0, "hostile": 0}}
problems, slowest = [], 0
try:
    begin_training()
    grant()
    time.sleep(10)
    end = time.time() + a.minutes * 60
    while time.time() < end:
        line = {}
        for window, seconds, work in [("quiet", a.quiet, None), ("hostile", a.hostile, attack)]:
            rates, took, health, found = measured(seconds, work)
            total["seconds"][window] += took
            for name, rate in rates.items():
                total[window][name] = total[window].get(name, 0) + rate * took
            line[window] = {name: round(rate, 3) for name, rate in rates.items()} | {"health_seconds": health}
            problems += found
            slowest = max(slowest, health)
        calm()
        print(json.dumps(line | {"controller_mib": controller_memory(), "problems": problems[:3]}), flush=True)
    problems += unintended()
    rate = lambda window, name: total[window][name] / total["seconds"][window]
    ratios = {name: round(rate("hostile", name) / rate("quiet", name), 3) for name in ["paced", "trained"]}
    print(json.dumps({"ratios": ratios, "slowest_health_seconds": slowest, "problems": len(problems),
                      "controller_mib": controller_memory(),
                      "accepted": sum(answer["accepted"] for answer in answers.values()),
                      "refused": sum(answer["refused"] for answer in answers.values()),
                      "hostile_minutes": round(total["seconds"]["hostile"] / 60, 1)}))
    if problems or ratios["paced"] < 0.95:
        sys.exit(f"the other tenant was hurt: {problems[:5]} {ratios}")
finally:
    calm()
    kubectl("-n", "victim", "delete", "tj", "--all", "--timeout=60s", check=False)
    kubectl("delete", "namespace", "victim", "hostile", "--wait=false", check=False)
    kubectl("delete", "pv", "victim", "--wait=false", check=False)
    shutil.rmtree(volume, ignore_errors=True)
