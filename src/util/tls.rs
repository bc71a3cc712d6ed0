//! Root certificates of TLS.

use webpki_root_certs::TLS_SERVER_ROOT_CERTS;

/// Mozilla's root certificates in DER where the system has none, as in an image made from scratch; else `None`.
pub fn in_place_of_systems() -> Option<impl Iterator<Item = &'static [u8]>> {
    let system = rustls_native_certs::load_native_certs().certs;
    let roots = || TLS_SERVER_ROOT_CERTS.iter().map(|root| root.as_ref());
    system.is_empty().then(roots)
}
