//! `PurgeTenant`.

use crate::{
    auth::file::is_name,
    error::{Error, Reason, Violation},
    ids::Tenant,
    proto,
    routing::PinKey,
    stack::Parts,
    store::notes::Note,
};

/// Removes what is kept of a tenant, step by step.
///
/// # Errors
/// INVALID_REQUEST, TENANT_ACTIVE, TENANT_NOT_FOUND, and what the store says.
pub(super) async fn purge(
    parts: &Parts,
    tenant: &str,
) -> Result<proto::PurgeTenantResponse, Error> {
    if !is_name(tenant) {
        return Err(Error::invalid(
            Reason::InvalidRequest,
            vec![Violation::new(
                "tenant",
                "must have 1 to 128 characters of [A-Za-z0-9._:@/-]",
            )],
        ));
    }
    let tenant = Tenant::new(tenant);
    let running = parts.admission.of(&tenant);
    if running > 0 {
        return Err(Error::new(
            Reason::TenantActive,
            format!(
                "{running} samples of this tenant run or wait to: let them end, or take its \
                 credentials away first"
            ),
        ));
    }
    let mut all = proto::PurgeTenantResponse::default();
    let mut from = None;
    loop {
        let step = parts.store.purge(tenant.clone(), from).await?;
        all.keys += step.keys;
        all.bytes += step.bytes;
        all.kept += step.owned;
        if !step.pins.is_empty() {
            let notes = step.pins.iter().map(|pin| Note::Pin(*pin, None)).collect();
            parts.store.note(notes).await?;
            let gone = step
                .pins
                .iter()
                .filter(|pin| parts.router.finish(PinKey(**pin)));
            all.pins += gone.count() as u64;
        }
        from = step.next;
        if from.is_none() {
            break;
        }
    }
    if all.keys == 0 && all.kept == 0 {
        return Err(Error::new(
            Reason::TenantNotFound,
            "nothing is kept of a tenant of this name",
        ));
    }
    Ok(all)
}
