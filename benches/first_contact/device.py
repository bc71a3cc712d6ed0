#!/usr/bin/env python3
"""The driver's attributes of the device, and cuDNN's DEVICEPROP: device.py DEVICEPROP_FILE

cuDNN builds plans without a GPU from its JSON description of a device (9.8 and newer). This writes that
description, so that a machine without a GPU can use it. What is missing is said and is no failure.
"""
import ctypes, glob, json, os, sys, sysconfig

# `cudnn_graph_v9.h`
DEVICEPROP_DESCRIPTOR, DEVICE_ID, JSON_REPRESENTATION = 38, 2700, 2702
TYPE_INT32, TYPE_CHAR = 23, 24


def driver_attributes():
    cuda = ctypes.CDLL("libcuda.so.1")
    device, value = ctypes.c_int(), ctypes.c_int()
    if (code := cuda.cuInit(0)) or (code := cuda.cuDeviceGet(ctypes.byref(device), 0)):
        raise OSError(f"the driver answers {code}")
    attributes = {}
    for number in range(1, 160):
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0:
            attributes[number] = value.value
    return attributes


def cudnn_device():
    places = [*os.environ.get("EVENKEEL_CUDA_LIBRARIES", "").split(":"), sysconfig.get_path("platlib")]
    found = [path for place in places for path in glob.glob(f"{place}/nvidia/cudnn/lib/libcudnn.so.9")]
    if found:
        # torch preloads what cuDNN needs.
        try:
            import torch  # noqa: F401
        except ImportError:
            pass
    cudnn = ctypes.CDLL(found[0] if found else "libcudnn.so.9")
    cudnn.cudnnGetVersion.restype = ctypes.c_size_t
    cudnn.cudnnGetErrorString.restype = ctypes.c_char_p
    descriptor, device = ctypes.c_void_p(), ctypes.c_int32(0)
    count = ctypes.c_int64()

    def call(name, *arguments):
        if code := getattr(cudnn, name)(*arguments):
            raise OSError(f"{name}: {cudnn.cudnnGetErrorString(code).decode()}")

    call("cudnnBackendCreateDescriptor", DEVICEPROP_DESCRIPTOR, ctypes.byref(descriptor))
    call("cudnnBackendSetAttribute", descriptor, DEVICE_ID, TYPE_INT32, ctypes.c_int64(1), ctypes.byref(device))
    call("cudnnBackendFinalize", descriptor)
    call("cudnnBackendGetAttribute", descriptor, JSON_REPRESENTATION, TYPE_CHAR, ctypes.c_int64(0),
         ctypes.byref(count), None)
    text = ctypes.create_string_buffer(count.value + 1)
    call("cudnnBackendGetAttribute", descriptor, JSON_REPRESENTATION, TYPE_CHAR, count, ctypes.byref(count), text)
    return cudnn.cudnnGetVersion(), text.value.decode()


try:
    print(json.dumps({"result": "attributes", "values": driver_attributes()}))
except OSError as error:
    print(json.dumps({"result": "attributes", "missing": str(error)}))
try:
    version, text = cudnn_device()
    with open(sys.argv[1], "w") as file:
        file.write(text)
    print(json.dumps({"result": "deviceprop", "cudnn": version, "bytes": len(text), "file": sys.argv[1]}))
except (OSError, AttributeError) as error:
    print(json.dumps({"result": "deviceprop", "missing": str(error)}))
