"""Compare the DeepSpeed config that accelerate makes from a launcher's variables with the one that it makes from
evenkeel's file.

    deepspeed_plugin.py < CASES

Every line of CASES is {"name", "stated": variables, "with_file": variables}. Prints one line for every case that
differs, and at the end the number of cases.
"""
import json
import os
import sys
import warnings

from accelerate.utils import DeepSpeedPlugin

warnings.simplefilter("ignore")


def made(variables):
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.update(variables)
    plugin = DeepSpeedPlugin()
    precision = variables.get("ACCELERATE_MIXED_PRECISION", "no")
    plugin.set_mixed_precision(precision)
    return {"config": plugin.deepspeed_config, "init": plugin.zero3_init_flag, "stage": plugin.zero_stage}


count = 0
for line in sys.stdin:
    case = json.loads(line)
    stated, with_file = made(case["stated"]), made(case["with_file"])
    # The file says that ranks load a universal checkpoint.
    with_file["config"].pop("checkpoint")
    if stated != with_file:
        print(case["name"], stated, with_file)
    count += 1
print(count)
