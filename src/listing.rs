//! Whole lists for clients of ours, page by page.

use tonic::Status;

use crate::{
    auth::client::Wire,
    proto::{ListReplicasRequest, Replica, fleet_service_client::FleetServiceClient},
};

/// All replicas (of `model`, where given) in order of their ids.
///
/// # Errors
/// What the control plane answers; INTERNAL where its pages do not end.
pub(crate) async fn replicas(
    mut client: FleetServiceClient<Wire>,
    model: Option<String>,
) -> Result<Vec<Replica>, Status> {
    let mut all = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = ListReplicasRequest {
            model: model.clone(),
            page_size: 0,
            page_token: page_token.clone(),
        };
        let page = client.list_replicas(request).await?.into_inner();
        all.extend(page.replicas);
        if page.next_page_token.is_empty() {
            return Ok(all);
        }
        // They are in order, so whoever goes on for ever repeats itself.
        if page.next_page_token <= page_token {
            return Err(Status::internal("the pages of ListReplicas do not end"));
        }
        page_token = page.next_page_token;
    }
}
