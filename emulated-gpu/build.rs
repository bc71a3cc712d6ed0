//! The library starts threads, so it must stay mapped when a program closes it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-cdylib=-Wl,-z,nodelete");
}
