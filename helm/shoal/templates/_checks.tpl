{{/* What two values demand of each other: each is one sentence that says what to do. */}}

{{- define "shoal.checks" -}}
{{- $values := .Values -}}
{{- $external := $values.etcd.external -}}
{{- $fullname := include "shoal.fullname" . -}}
{{- range $name, $program := dict "image" "controller" "workerImage" "worker" -}}
{{- if not (index $values $name).repository -}}
{{- fail (printf "%s.repository is empty, and no image is published; build deploy/%s.Dockerfile, push it to a registry that the cluster reaches, and name it" $name $program) -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]" $fullname) -}}
{{- fail (printf "everything would be named %s, but a service's name begins with a letter; set fullnameOverride, or give the release another name" $fullname) -}}
{{- end -}}
{{- if has $fullname (list "true" "false" "yes" "no" "on" "off" "y" "n" "null") -}}
{{- fail (printf "everything would be named %s, which YAML takes for another thing than a name; set fullnameOverride" $fullname) -}}
{{- end -}}
{{- if eq $values.store "embedded" -}}
{{- if ne (int $values.controller.replicas) 1 -}}
{{- fail (printf "controller.replicas is %d, but an embedded store can be held by one controller only; set controller.replicas to 1, or store to etcd" (int $values.controller.replicas)) -}}
{{- end -}}
{{- if $external.endpoints -}}
{{- fail "etcd.external.endpoints is given, but store is embedded; set store to etcd, or leave the endpoints out" -}}
{{- end -}}
{{- end -}}
{{- if and $values.backup.enabled (eq $values.store "embedded") -}}
{{- fail "backup.enabled is true, but store is embedded, whose volume the controller alone has; set store to etcd, or run `shoal backup` in the controller's pod" -}}
{{- end -}}
{{- if and $external.user (not $external.passwordSecret) -}}
{{- fail (printf "etcd.external.user is %s, but etcd.external.passwordSecret is empty; name the secret that has the password in its key `password`" $external.user) -}}
{{- end -}}
{{- if and $external.clientCertificate (not $external.tlsSecret) -}}
{{- fail "etcd.external.clientCertificate is true, but etcd.external.tlsSecret is empty; name the secret with ca.crt, tls.crt and tls.key" -}}
{{- end -}}
{{- if not $external.endpoints -}}
{{- range $name := list "user" "passwordSecret" "tlsSecret" -}}
{{- if get $external $name -}}
{{- fail (printf "etcd.external.%s is given, but etcd.external.endpoints is empty; name the members of your etcd, or leave it out" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $values.tls.source "secret") (not $values.tls.secret) -}}
{{- fail "tls.source is secret, but tls.secret is empty; name the secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and (ne $values.tls.source "secret") $values.tls.secret -}}
{{- fail (printf "tls.secret is %s, but tls.source is %s; set tls.source to secret, or leave tls.secret out" $values.tls.secret $values.tls.source) -}}
{{- end -}}
{{- if and (eq $values.tls.source "certManager") (not $values.tls.issuer.name) -}}
{{- fail "tls.source is certManager, but tls.issuer.name is empty; name an issuer of cert-manager" -}}
{{- end -}}
{{- if and $values.tls.workers (eq $values.tls.source "none") -}}
{{- fail "tls.workers is true, but tls.source is none; set tls.source to secret, generated or certManager" -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.hosts) -}}
{{- fail "ingress.enabled is true, but ingress.hosts is empty; name the hosts under which REST is to be reached" -}}
{{- end -}}
{{- $monitor := $values.monitoring.serviceMonitor -}}
{{- if and $monitor.enabled (not $monitor.tokenSecret) (not $values.rbac.create) -}}
{{- fail "monitoring.serviceMonitor.enabled is true and monitoring.serviceMonitor.tokenSecret is empty, but the job that would make the token needs a role, and rbac.create is false; make a token of role view, and name the secret that has it in its key `token`" -}}
{{- end -}}
{{- range $component := list "controller" "etcd" -}}
{{- range $label := keys (index $values $component).podLabels -}}
{{- if has $label (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component") -}}
{{- fail (printf "%s.podLabels has %s, by which the chart finds its pods; leave it out, or set nameOverride" $component $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := $values.controller.env -}}
{{- if hasPrefix "SHOAL_" $name -}}
{{- fail (printf "controller.env.%s is a setting of Shoal, which the chart sets by values of its own; leave it out of controller.env" $name) -}}
{{- end -}}
{{- end -}}
{{- include "shoal.renderedOnce" . -}}
{{- end -}}

{{/* What is made once is found again in the cluster. Where there is none to ask (Argo CD, `helm template`), each render
     would make it anew, and the next one would replace it. Every namespace has an account `default`; one that is still to
     be created has none, but then kube-system may be read. */}}
{{- define "shoal.renderedOnce" -}}
{{- $made := list -}}
{{- if not .Values.token.existingSecret -}}
{{- $made = append $made "a root token; make a secret with a token in its key `token`, and name it in token.existingSecret" -}}
{{- end -}}
{{- if eq .Values.tls.source "generated" -}}
{{- $made = append $made "certificates; set tls.source to certManager or secret" -}}
{{- end -}}
{{- if $made -}}
{{- if not (lookup "v1" "ServiceAccount" .Release.Namespace "default") -}}
{{- if not (lookup "v1" "Namespace" "" "kube-system") -}}
{{- fail (printf "there is no cluster to ask, so each render would make %s" (join ", and " $made)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
