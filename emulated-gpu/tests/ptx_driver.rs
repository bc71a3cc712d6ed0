//! PTX through the C interface of the driver: the interpreter and the driver together.

mod common;

use std::ffi::CString;

use common::*;

/// y = a · x + y for n elements, as NVRTC writes it.
const SAXPY: &str = r#"
.version 8.0
.target sm_90
.address_size 64
.visible .global .align 4 .u32 calls;
.visible .entry saxpy(.param .u64 y, .param .u64 x, .param .f32 a, .param .u32 n)
{
    .reg .pred %p<2>; .reg .f32 %f<4>; .reg .b32 %r<6>; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [y];
    ld.param.u64 %rd2, [x];
    ld.param.f32 %f1, [a];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.s32 %p1, %r5, %r1;
    @%p1 bra $DONE;
    cvta.to.global.u64 %rd3, %rd2;
    mul.wide.s32 %rd4, %r5, 4;
    add.s64 %rd5, %rd3, %rd4;
    ld.global.f32 %f2, [%rd5];
    cvta.to.global.u64 %rd6, %rd1;
    add.s64 %rd7, %rd6, %rd4;
    ld.global.f32 %f3, [%rd7];
    fma.rn.f32 %f3, %f1, %f2, %f3;
    st.global.f32 [%rd7], %f3;
$DONE:
    ret;
}
"#;

#[test]
fn ptx_runs_through_the_driver_and_names_a_wrong_access() {
    let report = in_child(
        "ptx_runs_through_the_driver_and_names_a_wrong_access",
        &[],
        || {
            let cuda = Cuda::start();
            let text = CString::new(SAXPY).unwrap();
            let module = cuda.out(|module| cuda.cuModuleLoadData(module, text.as_ptr().cast()));
            let saxpy = cuda.function(module, "saxpy");
            let n = 4096;
            let (x, y) = (cuda.put(&vec![2.0; n]), cuda.put(&vec![1.0; n]));
            let launch = |count: u32| {
                let a = 3f32;
                let parameters = [pointer(&y), pointer(&x), pointer(&a), pointer(&count)];
                let blocks = count.div_ceil(256);
                let launched = cuda.cuLaunchKernel(
                    saxpy,
                    blocks,
                    1,
                    1,
                    256,
                    1,
                    1,
                    0,
                    0,
                    parameters.as_ptr(),
                    std::ptr::null(),
                );
                assert_eq!(launched, 0);
                cuda.cuCtxSynchronize()
            };
            assert_eq!(launch(n as u32), 0);
            assert_eq!(cuda.get(y, n), vec![7.0; n]);
            assert_eq!(launch(n as u32 + 1), ILLEGAL_ADDRESS);
        },
    );
    if let Some(report) = report {
        let faults: Vec<String> = of_kind(&report, "fault")
            .iter()
            .map(ToString::to_string)
            .collect();
        assert!(
            faults.len() == 1 && faults[0].contains("block (16, 0, 0), thread (0, 0, 0)"),
            "{faults:#?}"
        );
    }
}
